//! Processes that share samples, in memory or in a file, and are killed at any moment: whoever reads one finds it whole.

use std::fs::{self, File, OpenOptions};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
#[cfg(ringloader_failpoints)]
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ringloader_core::samples::{Bound, Samples, Stored, record};

use super::content::Random;
use super::parent::Seen;
use super::storms::Effort;
use super::worker;

/// The first word of a worker's orders.
pub(crate) const NAME: &str = "samples";

const LEN: usize = 40;
const VERSION: &str = "storm";

/// A folder with the file, that goes with this.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        let folder = std::env::temp_dir().join(format!("ringloader-samples-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn file(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

fn open(path: &Path) -> Samples {
    Samples::open(file(path).into(), LEN, VERSION, Bound::new(None, 1)).unwrap()
}

/// The bytes of a sample, behind a record's header.
fn bytes(index: usize) -> Vec<u8> {
    let len = 10 + index * index * 97;
    (0..len).map(|at| (at * 7 + at / 251 + index * 31) as u8 | 1).collect()
}

/// Reads a sample; `false`: it is not there.
fn read(samples: &Samples, index: usize) -> bool {
    let Some(found) = samples.find(index) else { return false };
    if index % 8 == 7 {
        // Another may clear all samples meanwhile.
        thread::sleep(Duration::from_micros(100));
    }
    let mut into = vec![MaybeUninit::uninit(); found.len() as usize];
    let Some((bytes_read, last)) = samples.read(&found, &mut into) else { return false };
    assert!(last == record::HEADER && bytes_read[last..] == bytes(index), "a sample is wrong");
    true
}

fn store(samples: &Samples, index: usize) -> Stored {
    let mut record = vec![0; record::HEADER];
    record.extend_from_slice(&bytes(index));
    samples.seal(&mut record, index, record::HEADER);
    samples.store(index, &record)
}

/// Reads samples, and makes those that are missing, until it is killed. Forgets all of them now and then, if `clears`.
pub(crate) fn work(orders: &str) {
    let fields: Vec<&str> = orders.split(' ').collect();
    let [_, path, seed, clears] = fields[..] else { panic!("{orders}") };
    let samples = match path {
        "memory" => {
            let fd = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
            Samples::attach(fd, None, LEN, Bound::new(None, 1)).unwrap()
        }
        path => open(Path::new(path)),
    };
    let mut random = Random(seed.parse().unwrap());
    loop {
        let index = random.below(LEN as u64) as usize;
        if clears == "clears" && random.once_in(12) {
            samples.clear().unwrap();
        }
        if !read(&samples, index) {
            assert_eq!(store(&samples, index), Stored::There);
        }
    }
}

/// A worker, which does not outlive a run that fails.
struct Worker(Child);

impl Worker {
    /// Kills it. It has found nothing wrong until then.
    fn end(mut self) {
        assert!(self.0.try_wait().unwrap().is_none(), "a worker has ended: a sample is wrong");
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn spawn(path: Option<&Path>, samples: &Samples, orders: &str, failpoint: Option<&str>) -> Worker {
    let path = path.map_or("memory".into(), Path::to_string_lossy);
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env(worker::ORDERS, format!("{NAME} {path} {orders}")).env_remove("RINGLOADER_FAILPOINT");
    command.envs(failpoint.map(|failpoint| ("RINGLOADER_FAILPOINT", failpoint)));
    command.stdin(Stdio::from(samples.fds().unwrap().0.try_clone_to_owned().unwrap()));
    Worker(command.spawn().unwrap())
}

/// Kills one of three workers again and again, in memory and in a file.
pub(crate) fn kills(effort: Effort) -> Seen {
    let folder = Folder::new();
    let mut seen = Seen::default();
    for in_file in [false, true] {
        let path = in_file.then(|| folder.0.join("storm"));
        let samples =
            path.as_deref().map_or_else(|| Samples::in_memory(LEN, Bound::new(None, 1)).unwrap(), open);
        let mut random = Random(effort.seed);
        let start = |random: &mut Random| {
            let clears = if random.once_in(2) { "clears" } else { "keeps" };
            spawn(path.as_deref(), &samples, &format!("{} {clears}", random.next()), None)
        };
        let mut workers: Vec<Worker> = (0..3).map(|_| start(&mut random)).collect();
        let (end, kills) = (Instant::now() + effort.time / 2, seen.kills);
        while Instant::now() < end || seen.kills < kills + 3 {
            thread::sleep(Duration::from_micros(random.below(30_000)));
            workers.swap_remove(random.below(3) as usize).end();
            seen.kills += 1;
            if let Some(path) = &path {
                flip(path, &mut random);
            }
            workers.push(start(&mut random));
            seen.batches += (0..LEN).filter(|&index| read(&samples, index)).count() as u64;
        }
        workers.into_iter().for_each(Worker::end);
        for index in 0..LEN {
            assert!(read(&samples, index) || store(&samples, index) == Stored::There);
            assert!(read(&samples, index), "a sample cannot be kept");
        }
        assert_eq!(samples.stats().items, LEN as u64);
    }
    seen
}

/// Flips a bit of some record or table.
fn flip(path: &Path, random: &mut Random) {
    let file = file(path);
    let at = 4096 + random.below(file.metadata().unwrap().len().max(4097) - 4096);
    let mut byte = [0];
    if file.read_at(&mut byte, at).unwrap() == 1 {
        file.write_at(&[byte[0] ^ 1 << random.below(8)], at).unwrap();
    }
}

/// A worker dies at each moment between two stores of a sample.
#[cfg(ringloader_failpoints)]
pub(crate) fn deaths(_: Effort) -> Seen {
    let folder = Folder::new();
    let mut seen = Seen::default();
    for (point, is_kept) in [
        ("samples-half-made", false),
        ("sample-reserved", false),
        ("sample-written", false),
        ("sample-published", true),
    ] {
        let is_making = point == "samples-half-made";
        for in_file in [false, true] {
            // In memory nothing is half-made, and in a file nothing is reserved before it is written.
            if in_file && point == "sample-reserved" || !in_file && is_making {
                continue;
            }
            let path = in_file.then(|| folder.0.join(point));
            let memory = Samples::in_memory(LEN, Bound::new(None, 1)).unwrap();
            let failpoint = format!("{point}:kill");
            let dead = spawn(path.as_deref(), &memory, "1 keeps", Some(&failpoint)).0.wait().unwrap();
            assert_eq!(dead.signal(), Some(9), "{point} was not reached");
            seen.kills += 1;
            let samples = path.as_deref().map_or(memory, open);
            assert_eq!(samples.stats().bytes > 0, !is_making, "{point}");
            let there = (0..LEN).filter(|&index| read(&samples, index)).count();
            assert_eq!(
                there,
                usize::from(is_kept),
                "{point}: a published sample is not there, or another one is"
            );
            for index in 0..LEN {
                assert_eq!(store(&samples, index), Stored::There);
                assert!(read(&samples, index));
                seen.batches += 1;
            }
        }
        println!("point {point}");
    }
    seen
}
