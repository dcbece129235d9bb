use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;

use super::geometry::{GRANULE, MAX_SEGMENT};
use super::structures::SegmentHeader;
use super::{Control, Geometry};
use crate::error::{Error, Result};
use crate::os::Segment;
use crate::os::page::tests::{for_each_page_size, for_page_size};
use crate::pool::SlotId;
use crate::sync::{Ordering, WaitFlag};

/// Two cache lines, which processors fetch together.
const LINE: u64 = 128;

fn create(geometry: Geometry) -> (Control, OwnedFd) {
    Control::create(geometry).unwrap()
}

fn attach(fd: &OwnedFd) -> Result<Control> {
    Control::attach(Segment::attach(fd.as_fd())?)
}

#[test]
fn two_mappings_see_one_ring() {
    let (ours, fd) = create(Geometry::new(3, 6, 1 << 20).unwrap());
    let theirs = attach(&fd).unwrap();
    assert_eq!(ours.geometry(), theirs.geometry());
    for worker in 0..3 {
        let (ours, theirs) = (ours.worker(worker), theirs.worker(worker));
        let mut producer = crate::ring::Producer::attach(ours.tasks).unwrap();
        let mut consumer = crate::ring::Consumer::attach(theirs.tasks).unwrap();
        let words = [u64::from(worker), 2, 3, 4, 5, 6, 7, 8];
        assert!(producer.push(ours.tasks, &words).unwrap());
        assert_eq!(consumer.pop(theirs.tasks).unwrap(), Some(words));
    }
}

#[test]
fn no_two_ranges_overlap() {
    let geometry = Geometry::new(3, 40, 100_000).unwrap();
    let (control, _fd) = create(geometry);
    let mut ranges = Vec::new();
    for worker in 0..3 {
        let at = control.offsets.controls + u64::from(worker) * control.offsets.block.len;
        ranges.push(at..at + control.offsets.block.len);
        ranges.push(control.arena(worker));
        ranges.extend((0..geometry.slots).map(|slot| control.window(worker, SlotId::new(slot))));
    }
    ranges.push(0..control.offsets.controls);
    ranges.sort_by_key(|range| range.start);
    assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start));
    assert!(ranges.last().unwrap().end <= control.segment().len());
    assert!(
        ranges.iter().all(|range| range.start.is_multiple_of(GRANULE) && range.end.is_multiple_of(GRANULE))
    );
}

/// They are the lines of the ready bits, and of the flag of a parent that sleeps for any worker.
#[test]
fn few_lines_are_written_by_several_workers() {
    for (workers, shared) in [(1, 0), (2, 2), (8, 2), (128, 2), (1024, 2)] {
        let (control, _fd) = create(Geometry::new(workers, 6, 1 << 20).unwrap());
        let base = control.segment().base().as_ptr() as usize;
        let offset = |flag: &WaitFlag| std::ptr::from_ref(flag).addr() as u64 - base as u64;
        let lines = |range: Range<u64>| range.start / LINE..range.end.div_ceil(LINE);
        let mut writers: HashMap<u64, u32> = HashMap::new();
        for worker in 0..workers {
            let block = control.offsets.controls + u64::from(worker) * control.offsets.block.len;
            let flag = offset(control.parent_sleeps());
            let ready = control.offsets.ready + u64::from(worker / 64) * 8;
            for range in [block..block + control.offsets.block.len, flag..flag + LINE, ready..ready + 8] {
                lines(range).for_each(|line| *writers.entry(line).or_default() += 1);
            }
        }
        assert_eq!(writers.values().filter(|&&writers| writers > 1).count(), shared, "{workers} workers");
    }
}

#[test]
fn the_first_refusal_is_kept() {
    let (control, _fd) = create(Geometry::new(1, 6, 1 << 20).unwrap());
    assert_eq!(control.take_refusal(), None);
    control.record_refusal(Err(Error::os("madvise", Errno::NOMEM)));
    control.record_refusal(Err(Error::os("madvise", Errno::INVAL)));
    assert_eq!(control.take_refusal(), Some(Error::os("madvise", Errno::NOMEM)));
    assert_eq!(control.take_refusal(), None, "once");
}

#[test]
fn geometry_grows_with_the_tasks_and_stays_in_the_address_space() {
    for (workers, tasks, largest) in [
        (1, 1, 1),
        (2, 4, 3 << 30),
        (64, 256, 1 << 40),
        (512, 2048, 1 << 30),
        (4096, 5, 1 << 40),
        (1, 1_000_000, 1),
    ] {
        let geometry = Geometry::new(workers, tasks, largest).unwrap();
        assert!(geometry.slots > 0 && geometry.slots.is_multiple_of(32));
        assert!(geometry.ring_capacity > tasks);
        assert!(geometry.window >= GRANULE && geometry.total() <= MAX_SEGMENT, "{geometry:?}");
        assert_eq!(Geometry::from_words(geometry.words(), geometry.total()), Ok(geometry));
        let offsets = geometry.offsets();
        assert!(offsets.ready >= size_of::<SegmentHeader>() as u64);
        assert!(offsets.ready + u64::from(workers.div_ceil(64)) * 8 <= offsets.controls);
    }
    assert!(Geometry::new(0, 1, 1).is_err());
    assert!(Geometry::new(1, u32::MAX, 1).is_err());
    assert!(Geometry::new(1, 1 << 24, 1).is_err());
    assert!(Geometry::new(1 << 16, 1, 1).is_err());
}

/// Slots and windows, for two tasks at a time: with a turn for each worker, and where one may be asked for all.
#[test]
fn windows_stay_useful_for_many_workers() {
    let geometry = |workers, tasks, largest: u64| {
        let Geometry { slots, window, .. } = Geometry::new(workers, tasks, largest).unwrap();
        (slots, window)
    };
    let in_turn = |workers, largest| geometry(workers, 5, largest);
    let any = |workers, largest| geometry(workers, 2 * workers + 3, largest);
    const LARGE: u64 = 32 << 30;
    assert_eq!(in_turn(1, LARGE), (64, 8 << 30));
    assert_eq!(any(1, LARGE), (64, 8 << 30));
    assert_eq!(in_turn(2, LARGE), (64, 4 << 30));
    assert_eq!(any(2, LARGE), (64, 4 << 30));
    assert_eq!(in_turn(64, LARGE), (64, 128 << 20));
    assert_eq!(any(64, LARGE), (128, 64 << 20));
    assert_eq!(in_turn(1000, LARGE), (32, 64 << 20));
    assert_eq!(any(1000, LARGE), (32, 64 << 20));
    // Small batches need no large windows, and may have many slots.
    assert_eq!(any(64, 1 << 20), (320, 1 << 20));
    assert_eq!(any(1000, 1 << 20), (512, 1 << 20));
    assert_eq!(any(1000, 1), (4032, GRANULE));
    assert_eq!(in_turn(1000, 38 << 20), (32, 64 << 20));
}

#[test]
fn the_segment_of_a_thousand_workers_can_be_had() {
    let (control, fd) = create(Geometry::new(1000, 2003, 38 << 20).unwrap());
    assert!(control.geometry().window > 38 << 20, "{:?}", control.geometry());
    let theirs = attach(&fd).unwrap();
    let last = SlotId::new(theirs.geometry().slots - 1);
    theirs.segment().copy_in(theirs.window(999, last).end - 1, &[7]).unwrap();
    let mut read = Vec::new();
    control.segment().copy_out(control.window(999, last).end - 1, 1, &mut read).unwrap();
    assert_eq!(read, [7]);
}

#[test]
fn a_foreign_segment_is_refused() {
    let (blank, _fd) = Segment::create("test", 1 << 20).unwrap();
    assert!(matches!(Control::attach(blank), Err(Error::Corrupt(_))));
    let (ours, fd) = create(Geometry::new(1, 1, 1 << 20).unwrap());
    for word in &ours.views.header.geometry {
        let held = word.swap(u64::MAX / 3, Ordering::Relaxed);
        assert!(attach(&fd).is_err(), "{held} replaced");
        word.store(held, Ordering::Relaxed);
    }
    assert!(attach(&fd).is_ok());
}

#[test]
fn parts_begin_and_end_with_pages_of_every_size() {
    for_each_page_size(|page| {
        let (control, fd) = create(Geometry::new(3, 40, 100_000).unwrap());
        assert_eq!(control.limits(1 << 20).page, page);
        let window = control.window(2, SlotId::new(5));
        for part in [control.arena(1), window.clone()] {
            assert!(part.start.is_multiple_of(page) && part.end.is_multiple_of(page));
        }
        let blocks = || rustix::fs::fstat(&fd).unwrap().st_blocks as u64 * 512;
        let before = blocks();
        control.segment().copy_in(window.start, &vec![7; 3 * page as usize]).unwrap();
        control.segment().punch(window.start + 1, 3 * page - 1).unwrap();
        assert_eq!(blocks(), before + page, "the first page is not wholly inside");
    });
}

#[test]
fn larger_pages_than_any_machine_has_are_refused() {
    for_page_size(2 * GRANULE, || {
        let refused = Control::create(Geometry::new(1, 6, 1 << 20).unwrap());
        assert!(matches!(refused, Err(Error::Config(_))));
    });
}
