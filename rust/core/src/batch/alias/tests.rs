use super::*;

/// A leaf: address, bytes, alignment, sharing, storage.
type Leaf = (usize, u64, usize, Sharing, Option<usize>);

struct Batch {
    leaves: Vec<Leaf>,
    /// Leaves whose storage was asked for.
    asked: Vec<u32>,
    refuses: bool,
}

impl Leaves for Batch {
    type Error = &'static str;

    fn count(&self) -> u32 {
        self.leaves.len() as u32
    }

    fn bytes(&self, leaf: u32) -> (usize, u64) {
        let (address, len, ..) = self.leaves[leaf as usize];
        (address, len)
    }

    fn sharing(&self, leaf: u32) -> Sharing {
        self.leaves[leaf as usize].3
    }

    fn alignment(&self, leaf: u32) -> usize {
        self.leaves[leaf as usize].2
    }

    fn storage(&mut self, leaf: u32) -> Result<Option<usize>, &'static str> {
        self.asked.push(leaf);
        if self.refuses { Err("refused") } else { Ok(self.leaves[leaf as usize].4) }
    }
}

fn tensor(address: usize, len: u64, storage: usize) -> Leaf {
    (address, len, 4, Sharing::Part, Some(storage))
}

fn array(address: usize, len: u64) -> Leaf {
    (address, len, 1, Sharing::Never, None)
}

fn whole(address: usize, len: u64, storage: usize) -> Leaf {
    (address, len, 1, Sharing::Whole, Some(storage))
}

fn formed_in(leaves: &[Leaf], filled: Range<usize>) -> (Groups, Vec<u32>) {
    let mut groups = Groups::default();
    let mut batch = Batch { leaves: leaves.to_vec(), asked: Vec::new(), refuses: false };
    groups.form(&mut batch, filled).unwrap();
    (groups, batch.asked)
}

type Memory = Vec<(usize, u64)>;

/// Each leaf's group, each group's address and bytes, and the leaves whose storage was asked for.
fn form(leaves: &[Leaf]) -> (Vec<Option<u32>>, Memory, Vec<u32>) {
    let (groups, asked) = formed_in(leaves, 0..0);
    let memory = groups.groups().iter().map(|group| (group.start, group.len)).collect();
    (groups.of_leaves().collect(), memory, asked)
}

#[test]
fn leaves_apart_are_groups_in_their_own_order_and_unasked() {
    let (of, memory, asked) = form(&[tensor(900, 8, 1), array(100, 5), tensor(500, 0, 1), tensor(300, 4, 1)]);
    assert_eq!(of, [Some(0), Some(1), None, Some(2)]);
    assert_eq!(memory, [(900, 8), (100, 5), (300, 4)]);
    assert_eq!(asked, [], "to ask runs foreign code");
}

#[test]
fn views_of_one_storage_are_one_group() {
    let (of, memory, asked) = form(&[tensor(120, 40, 7), tensor(100, 40, 7), tensor(100, 100, 7)]);
    assert_eq!(of, [Some(0); 3]);
    assert_eq!(memory, [(100, 100)]);
    assert_eq!(asked.iter().filter(|&&leaf| leaf == 2).count(), 1, "each is asked once: {asked:?}");
    // A chain grows the group.
    let (of, memory, _) = form(&[tensor(100, 40, 7), tensor(120, 40, 7), tensor(156, 40, 7)]);
    assert_eq!((of, memory), (vec![Some(0); 3], vec![(100, 96)]));
}

#[test]
fn overlaps_of_other_storages_arrays_and_unknown_ones_stay_apart() {
    let unknown = (100, 40, 4, Sharing::Part, None);
    for other in [tensor(120, 40, 8), array(120, 40), unknown] {
        let (of, memory, _) = form(&[tensor(100, 40, 7), other]);
        assert_eq!((of.len(), memory.len()), (2, 2), "{other:?}");
    }
    assert_eq!(form(&[unknown, unknown]).1.len(), 2, "two unknown ones are not the same");
    // Past the memory of another group, the group of the same storage is still found.
    let (of, ..) = form(&[tensor(100, 80, 7), tensor(120, 40, 8), tensor(140, 8, 7)]);
    assert_eq!(of, [Some(0), Some(1), Some(0)]);
}

#[test]
fn what_would_lie_misaligned_stays_apart() {
    let (of, ..) = form(&[tensor(100, 40, 7), tensor(102, 8, 7)]);
    assert_eq!(of, [Some(0), Some(1)]);
}

#[test]
fn a_whole_storage_begins_its_group() {
    let (of, memory, _) = form(&[tensor(120, 8, 7), whole(100, 64, 7), tensor(100, 8, 7)]);
    assert_eq!((of, memory), (vec![Some(0); 3], vec![(100, 64)]));
    let (of, ..) = form(&[tensor(100, 40, 7), whole(104, 16, 7)]);
    assert_eq!(of, [Some(0), Some(1)], "it cannot begin inside");
}

#[test]
fn a_refusal_is_passed_on() {
    let leaves = vec![tensor(100, 40, 7), tensor(100, 40, 7)];
    let mut batch = Batch { leaves, asked: Vec::new(), refuses: true };
    assert_eq!(Groups::default().form(&mut batch, 0..0), Err("refused"));
}

#[test]
fn numbers_follow_the_leaves_wherever_the_memory_is() {
    let at = |places: [usize; 4]| {
        let leaves = places.map(|place| tensor(place, 16, place));
        let (groups, _) = formed_in(&leaves, 0..0);
        let starts: Vec<_> = groups.groups().iter().map(|group| group.start).collect();
        (groups.of_leaves().collect::<Vec<_>>(), starts)
    };
    for places in [[400, 100, 300, 200], [100, 200, 300, 400], [200, 300, 400, 100]] {
        assert_eq!(at(places), ((0..4).map(Some).collect(), places.to_vec()));
    }
}

fn assigned(groups: &Groups, bump: Option<u64>) -> (Vec<StorageOffset>, u64) {
    let mut all = Vec::new();
    let end = groups.assign_offsets(bump, |number, _, assigned| {
        assert_eq!(number as usize, all.len());
        all.push(assigned);
    });
    (all, end)
}

#[test]
fn what_lies_in_the_slot_stays_there_with_what_lies_before_it() {
    let leaves = [tensor(1100, 30, 1), array(1200, 8), tensor(5000, 10, 2), tensor(1280, 128, 3)];
    let (groups, _) = formed_in(&leaves, 1024..1408);
    assert_eq!(groups.in_place(), 2);
    let memory: Vec<_> = groups.groups().iter().map(|group| (group.start, group.len)).collect();
    assert_eq!(memory, [(1088, 42), (1200, 8), (5000, 10), (1280, 128)]);
    let copied = |offset| StorageOffset { offset, is_copied: true };
    let there = |offset| StorageOffset { offset, is_copied: false };
    assert_eq!(assigned(&groups, Some(384)), (vec![there(64), copied(384), copied(448), there(256)], 458));
    // In a segment of their own, all are copied.
    assert_eq!(assigned(&groups, None), (vec![copied(0), copied(64), copied(128), copied(192)], 320));
}

#[test]
fn what_begins_within_another_storage_is_copied() {
    let (groups, _) = formed_in(&[tensor(1024, 64, 1), tensor(1088 - 16, 64, 2)], 1024..2048);
    let (all, _) = assigned(&groups, Some(1024));
    assert_eq!(all.iter().map(|assigned| assigned.is_copied).collect::<Vec<_>>(), [false, true]);
}

#[test]
fn nothing_is_left_of_the_batch_before() {
    let (mut groups, _) = formed_in(&[tensor(100, 8, 1), tensor(200, 0, 1)], 0..0);
    assert!(groups.has_empty());
    groups.clear();
    assert!(!groups.has_empty() && groups.groups().is_empty());
    assert_eq!(assigned(&groups, Some(7)), (vec![], 7));
}
