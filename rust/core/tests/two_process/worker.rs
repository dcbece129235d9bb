//! The process that fills slots: what a worker does, without Python.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringloader_core::batch::{Dtype, MetaWriter, StorageRecord};
use ringloader_core::os::{Segment, fd_passing};
use ringloader_core::sync::Ordering;
use ringloader_core::transport::message::{ResultKind, Task, TaskKind};
use ringloader_core::transport::port::{ALIGNMENT, Chunk, Commit, Port, Room, Wake};
use ringloader_core::transport::{Control, PortFds};

use super::content::{LeafSpec, Profile, Random};

/// The variable with a worker's orders: its number, its share, and the slots still held if it is a successor.
pub(crate) const ORDERS: &str = "RINGLOADER_TEST_WORKER";

/// The text of [`ORDERS`].
pub(crate) fn orders(worker: u32, share: u64, busy: Option<&[u64]>) -> String {
    let busy = busy.map(|words| words.iter().map(|word| format!("{word:x}")).collect::<Vec<_>>().join(","));
    format!("{worker} {share} {}", busy.as_deref().unwrap_or("first"))
}

struct Worker {
    control: Arc<Control>,
    port: Port,
    random: Random,
    /// Chunks that the worker keeps after their batch, as a dataset does that caches.
    kept: Vec<Chunk>,
}

/// Runs as a worker until the parent wants no more.
pub(crate) fn run(orders: &str) {
    let fields: Vec<&str> = orders.split(' ').collect();
    let (number, share) = (fields[0].parse().unwrap(), fields[1].parse().unwrap());
    // The descriptors come through standard input, so that no other child inherits them.
    let stdin = std::io::stdin();
    let [segment, eventfd, parent_eventfd, parent_pidfd, socket]: [OwnedFd; 5] =
        std::array::from_fn(|tag| fd_passing::receive(stdin.as_fd(), tag as u64).unwrap());
    let control = Arc::new(Control::attach(Segment::attach(segment.as_fd()).unwrap()).unwrap());
    drop(segment);
    let fds = PortFds { eventfd, parent_eventfd, parent_pidfd, socket };
    let words =
        || fields[2].split(',').map(|word| u64::from_str_radix(word, 16).unwrap()).collect::<Vec<_>>();
    let busy = (fields[2] != "first").then(words);
    let port = Port::attach(control.clone(), number, share, fds, busy.as_deref());
    let random = Random(u64::from(std::process::id()));
    let mut worker = Worker { control, port: port.unwrap(), random, kept: Vec::new() };
    while !worker.port.is_done() {
        match worker.port.try_task().unwrap() {
            Some(task) if task.kind == TaskKind::End => {
                if !task.bytes.is_empty() {
                    worker.audit();
                }
                break;
            }
            Some(task) => worker.answer(&task),
            None => {
                if worker.port.wait(Duration::from_secs(1)).unwrap() == Wake::ParentEnded {
                    break;
                }
            }
        }
    }
}

impl Worker {
    /// Waits until all slots are this worker's: the parent keeps none.
    fn audit(&mut self) {
        self.kept.clear();
        let slots = self.control.geometry().slots as usize;
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            let mut commits = Vec::new();
            loop {
                let mut commit = self.port.begin_commit();
                // No bytes: the memory that all slots would need at once is more than the share.
                match commit.reserve(0).unwrap() {
                    Room::Ready => commits.push(commit),
                    Room::Later | Room::Oversize => break,
                }
            }
            if commits.len() == slots {
                return;
            }
            assert!(Instant::now() < end, "{} of {slots} slots have come back", commits.len());
            drop(commits);
            let _ = self.port.wait_for_room();
        }
    }

    fn answer(&mut self, task: &Task) {
        let leaves = Profile::of(task).batch(task.seq);
        let chunks: Vec<Option<Chunk>> = leaves.iter().map(|leaf| self.collate(*leaf)).collect();
        let done = self.commit(task.seq, &leaves, &chunks);
        if done && self.random.once_in(16) {
            self.kept.extend(chunks.into_iter().flatten().take(1));
        }
        if self.kept.len() > 3 || self.random.once_in(32) {
            self.kept.clear();
        }
    }

    /// Writes a leaf into the slot, or leaves it to be copied there.
    fn collate(&mut self, leaf: LeafSpec) -> Option<Chunk> {
        if self.random.once_in(4) {
            return None;
        }
        if self.random.once_in(8) {
            // Stands for memory that collate takes on the way and drops.
            drop(self.port.allocate(leaf.len / 2 + 1).unwrap());
        }
        let chunk = self.port.allocate(leaf.len).unwrap()?;
        write(&self.control, chunk.address() as u64, leaf);
        Some(chunk)
    }

    /// Returns whether the batch was committed.
    fn commit(&self, seq: u64, leaves: &[LeafSpec], chunks: &[Option<Chunk>]) -> bool {
        let mut commit = self.port.begin_commit();
        let (mut meta, storages) = describe(leaves);
        let mut waits = 0;
        let plan = loop {
            let plan = Plan::new(&mut commit, leaves, chunks, false);
            // The count of waits is at most this long in the block.
            match commit.reserve(plan.end + meta.encoded_len() as u64 + 16).unwrap() {
                Room::Ready => break plan,
                Room::Later => {
                    waits += 1;
                    if self.port.wait_for_room().unwrap() == Wake::ParentEnded || self.port.is_done() {
                        return false;
                    }
                }
                Room::Oversize => {
                    let plan = Plan::new(&mut commit, leaves, chunks, true);
                    if commit.own_segment(plan.end + meta.encoded_len() as u64 + 16).unwrap() {
                        break plan;
                    }
                    waits += 1;
                    if self.port.wait_for_room().unwrap() == Wake::ParentEnded || self.port.is_done() {
                        return false;
                    }
                }
            }
        };
        for (storage, (leaf, (offset, _))) in storages.zip(leaves.iter().zip(&plan.leaves)) {
            meta.set_storage(storage, StorageRecord { offset: *offset, nbytes: leaf.len });
        }
        meta.skeleton().int(waits);
        let block = meta.finish(commit.generation());
        match commit.own() {
            Some(segment) => {
                plan.copies(leaves).for_each(|(leaf, offset)| put(segment, offset, leaf));
                segment.copy_in(plan.end, block).unwrap();
                while commit.send().unwrap() != fd_passing::SendOutcome::Yes {
                    if self.port.wait_for_room().unwrap() == Wake::ParentEnded || self.port.is_done() {
                        return false;
                    }
                }
            }
            None => {
                let at = |offset| commit.pointer(offset, 0).unwrap().as_ptr() as u64;
                plan.copies(leaves).for_each(|(leaf, offset)| write(&self.control, at(offset), leaf));
                let segment = self.control.segment();
                segment.copy_in(at(plan.end) - segment.base().as_ptr() as u64, block).unwrap();
            }
        }
        let counters = self.port.counters().now();
        counters.batches.fetch_add(1, Ordering::Relaxed);
        counters.oversize.fetch_add(commit.own().is_some().into(), Ordering::Relaxed);
        counters
            .in_place
            .fetch_add(plan.leaves.iter().filter(|(_, there)| *there).count() as u64, Ordering::Relaxed);
        let meta_at = plan.end..plan.end + block.len() as u64;
        while !commit.finish(seq, ResultKind::Batch, meta_at.clone(), meta_at.end).unwrap() {
            if self.port.wait_for_room().unwrap() == Wake::ParentEnded || self.port.is_done() {
                return false;
            }
        }
        true
    }
}

/// The block without the places of the storages, and without the count of waits.
fn describe(leaves: &[LeafSpec]) -> (MetaWriter, std::ops::Range<u32>) {
    let mut meta = MetaWriter::default();
    meta.skeleton().list(leaves.len() as u32 + 1);
    for leaf in leaves {
        let storage = meta.add_storage(StorageRecord { offset: 0, nbytes: leaf.len });
        let leaf = meta.add_tensor(storage, 0, Dtype::U8, &[leaf.len as i64], &[1]);
        meta.skeleton().leaf(leaf);
    }
    (meta, 0..leaves.len() as u32)
}

/// The places of a batch's leaves.
struct Plan {
    /// Offset, and whether the leaf is there already.
    leaves: Vec<(u64, bool)>,
    end: u64,
}

impl Plan {
    fn new(commit: &mut Commit<'_>, leaves: &[LeafSpec], chunks: &[Option<Chunk>], own: bool) -> Self {
        let mut end = if own { 0 } else { commit.bump() };
        let places = leaves.iter().zip(chunks).map(|(leaf, chunk)| {
            let there = chunk.as_ref().filter(|_| !own).map(|chunk| {
                let filled = commit.filled();
                let is_inside =
                    filled.contains(&chunk.address()) && filled.end - chunk.address() >= leaf.len as usize;
                assert!(is_inside, "a chunk lies in the slot that is being filled");
                (chunk.address() - filled.start) as u64
            });
            let offset = there.unwrap_or_else(|| {
                let offset = end.next_multiple_of(ALIGNMENT);
                end = offset + leaf.len;
                offset
            });
            (offset, there.is_some())
        });
        Self { leaves: places.collect(), end }
    }

    fn copies<'a>(&'a self, leaves: &'a [LeafSpec]) -> impl Iterator<Item = (LeafSpec, u64)> {
        let places = leaves.iter().zip(&self.leaves);
        places.filter(|(_, (_, there))| !there).map(|(leaf, (offset, _))| (*leaf, *offset))
    }
}

/// Writes a leaf to an address in the control's segment.
fn write(control: &Control, address: u64, leaf: LeafSpec) {
    put(control.segment(), address - control.segment().base().as_ptr() as u64, leaf);
}

fn put(segment: &Segment, mut offset: u64, leaf: LeafSpec) {
    for piece in leaf.pieces() {
        segment.copy_in(offset, piece).unwrap();
        offset += piece.len() as u64;
    }
}
