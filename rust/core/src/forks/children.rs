//! The forked children that live, and what is kept for them.

use super::{ForkClock, Moment};
use crate::sync::{AtomicU64, Lock, Ordering};
use crate::testing::failpoint::failpoint;
use crate::testing::fault::fault;

/// A forked child, and all that it has forked.
pub trait Child: Send {
    /// Returns true if none of these processes has the memory any more. An implementation may always return false, and
    /// returns true only if it is so.
    fn has_gone(&self) -> bool;
}

/// Something to be dropped once no child has it.
pub type Thing = Box<dyn Send>;

/// The forks of one process.
///
/// The lock is held only for moments, and only during system calls that do not wait.
pub struct Forks<C> {
    children: Lock<Children<C>>,
    /// The number of things that are kept. If it is 0, a look needs no lock.
    retained: AtomicU64,
}

struct Children<C> {
    /// The number of forks that have begun.
    begun: u64,
    records: Vec<ChildRecord<C>>,
    retained: Vec<Retained>,
}

/// One fork.
struct ChildRecord<C> {
    number: u64,
    /// `None` while it is under way.
    ended: Option<Moment>,
    child: C,
}

struct Retained {
    lent: Moment,
    /// The number of forks that had begun when the thing came back.
    begun: u64,
    thing: Thing,
}

impl<C> ChildRecord<C> {
    /// Returns true if the child may have a thing that was lent at the moment `lent`, and came back when `begun` forks
    /// had begun.
    fn may_have(&self, lent: Moment, begun: u64) -> bool {
        let is_early = |ended: Moment| ended.is_after(lent);
        self.number < begun && self.ended.map_or(!fault("fork_under_way_ignored"), is_early)
    }
}

impl<C: Child> Forks<C> {
    /// No forks yet.
    #[must_use]
    pub fn new() -> Self {
        let children = Children { begun: 0, records: Vec::new(), retained: Vec::new() };
        Self { children: Lock::new(children), retained: AtomicU64::new(0) }
    }

    /// A fork is about to happen, which `child` tells the end of. Returns its number.
    pub fn begin(&self, clock: &ForkClock, child: C) -> u64 {
        // Without this, the handles of children that have gone, and for which nothing is kept, would pile up.
        self.look();
        let mut children = self.children.lock();
        let number = children.begun;
        children.begun += 1;
        children.records.push(ChildRecord { number, ended: None, child });
        clock.begin();
        number
    }

    /// The fork with this number has happened, or failed. `anything`: whether anything is lent.
    pub fn end(&self, clock: &ForkClock, number: u64, anything: bool) {
        let mut children = self.children.lock();
        let ended = clock.end();
        let Some(at) = children.records.iter().position(|record| record.number == number) else { return };
        if anything || !children.retained.is_empty() {
            children.records[at].ended = Some(ended);
        } else {
            children.records.swap_remove(at);
        }
    }

    /// Drops `thing`, which was lent at a moment that is not [still](ForkClock::is_still), once no child may have it.
    /// From any thread.
    pub fn give_back(&self, lent: Moment, thing: Thing) {
        failpoint("given-back");
        let mut children = self.children.lock();
        let begun = children.begun;
        let is_retained = children.records.iter().any(|record| record.may_have(lent, begun));
        if !is_retained || fault("given_back_under_a_child") {
            drop(children);
            drop(thing);
            return;
        }
        children.retained.push(Retained { lent, begun, thing });
        self.retained.store(children.retained.len() as u64, Ordering::Relaxed);
        drop(children);
        self.look();
    }

    /// Returns true if anything is kept.
    #[inline]
    #[must_use]
    pub fn retains_anything(&self) -> bool {
        self.retained.load(Ordering::Relaxed) > 0
    }

    /// Looks which children have gone, and drops what was kept for them.
    pub fn look(&self) {
        let mut children = self.children.lock();
        let Children { records, retained, .. } = &mut *children;
        records.retain(|record| record.ended.is_none() || !record.child.has_gone());
        let mut gone = Vec::new();
        retained.retain_mut(|kept| {
            let stays = records.iter().any(|record| record.may_have(kept.lent, kept.begun));
            if !stays {
                gone.push(std::mem::replace(&mut kept.thing, Box::new(())));
            }
            stays
        });
        self.retained.store(retained.len() as u64, Ordering::Relaxed);
        // After the lock is released: to drop a thing may take other locks.
        drop(children);
        drop(gone);
    }

    /// In a forked child: lets go of the handles of its parent's children, if no thread was in the middle of anything
    /// at the fork. What is kept is the parent's, and stays.
    pub fn forget_children(&self) {
        if let Some(mut children) = self.children.try_lock() {
            children.records.clear();
        }
    }
}

impl<C> std::fmt::Debug for Forks<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Forks").finish_non_exhaustive()
    }
}

#[cfg(all(test, not(ringloader_loom)))]
mod tests {
    use super::*;
    use crate::sync::{Arc, AtomicBool};

    #[derive(Clone, Default)]
    struct Flag(Arc<AtomicBool>);

    impl Flag {
        fn set(&self) {
            self.0.store(true, Ordering::Relaxed);
        }

        fn is_set(&self) -> bool {
            self.0.load(Ordering::Relaxed)
        }
    }

    impl Child for Flag {
        fn has_gone(&self) -> bool {
            self.is_set()
        }
    }

    /// Sets its flag when it is dropped.
    struct Thing(Flag);

    impl Drop for Thing {
        fn drop(&mut self) {
            self.0.set();
        }
    }

    struct World {
        clock: ForkClock,
        forks: Forks<Flag>,
    }

    impl World {
        fn new() -> Self {
            let clock = ForkClock::default();
            clock.start(9);
            Self { clock, forks: Forks::new() }
        }

        fn fork(&self) -> Flag {
            let child = Flag::default();
            let number = self.forks.begin(&self.clock, child.clone());
            self.forks.end(&self.clock, number, true);
            child
        }

        /// Gives something back that was lent at `then`; whether it is dropped.
        fn give_back(&self, then: Moment) -> Flag {
            let dropped = Flag::default();
            self.forks.give_back(then, Box::new(Thing(dropped.clone())));
            dropped
        }
    }

    #[test]
    fn what_a_child_may_have_is_kept_until_it_has_gone() {
        let world = World::new();
        let lent = world.clock.now();
        let (first, second) = (world.fork(), world.fork());
        let dropped = world.give_back(lent);
        let later = world.fork();
        for (gone, is_dropped) in [(&later, false), (&first, false), (&second, true)] {
            gone.set();
            world.forks.look();
            assert_eq!(dropped.is_set(), is_dropped);
        }
        assert!(!world.forks.retains_anything());
    }

    #[test]
    fn a_child_that_came_before_or_after_keeps_nothing() {
        let world = World::new();
        let _before = world.fork();
        let lent = world.clock.now();
        assert!(world.clock.is_still(lent));
        assert!(world.give_back(lent).is_set());
        let between = world.fork();
        between.set();
        assert!(world.give_back(lent).is_set(), "the only child that may have it has gone");
    }

    #[test]
    fn what_is_lent_or_given_back_during_a_fork_is_kept() {
        let world = World::new();
        let before = world.clock.now();
        let child = Flag::default();
        let number = world.forks.begin(&world.clock, child.clone());
        let within = world.clock.now();
        let early = world.give_back(before);
        child.set();
        world.forks.look();
        assert!(!early.is_set(), "the fork is under way: its child cannot be known");
        world.forks.end(&world.clock, number, false);
        assert!(!early.is_set());
        let late = world.give_back(within);
        assert!(early.is_set() && late.is_set());
    }

    #[test]
    fn nothing_is_noted_of_a_fork_while_nothing_is_lent() {
        let world = World::new();
        let lent = world.clock.now();
        let number = world.forks.begin(&world.clock, Flag::default());
        world.forks.end(&world.clock, number, false);
        assert!(world.give_back(lent).is_set());
        assert!(world.forks.children.lock().records.is_empty());
    }

    #[test]
    fn a_thing_may_give_back_another_as_it_is_dropped() {
        struct Nested(Arc<World>, Moment);
        impl Drop for Nested {
            fn drop(&mut self) {
                self.0.give_back(self.1);
            }
        }
        let world = Arc::new(World::new());
        let lent = world.clock.now();
        let child = world.fork();
        world.forks.give_back(lent, Box::new(Nested(world.clone(), lent)));
        child.set();
        world.forks.look();
        assert!(!world.forks.retains_anything());
    }

    #[test]
    fn a_child_forgets_its_parents_children() {
        let world = World::new();
        let lent = world.clock.now();
        world.fork();
        let dropped = world.give_back(lent);
        world.forks.forget_children();
        assert!(world.forks.children.lock().records.is_empty() && !dropped.is_set());
    }
}
