//! Measures how much memory can still be taken before the system kills the process instead of refusing.
//!
//! At its limit, and without swap, a control group's process gets SIGKILL, never an error, so a process that is about
//! to touch new pages asks first.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// The bytes that are left, and the limit that says so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Available {
    /// Bytes that can still be taken.
    pub bytes: u64,
    /// The limit that is nearest, for messages.
    pub limit: String,
}

/// The files to read the figures from. The groups of a process do not change while it loads data.
#[derive(Debug, Clone)]
pub struct MemoryProbe {
    meminfo: PathBuf,
    groups: Vec<Group>,
    /// The bytes that the system keeps back from what it promises, if it promises no more than it has
    /// (`vm.overcommit_memory=2`). Pages of shared memory are promised when they are first touched, and one too many is
    /// a SIGBUS.
    promises: Option<u64>,
}

#[derive(Debug, Clone)]
struct Group {
    path: PathBuf,
    files: &'static Files,
}

/// The names of a control group's files, and of lines in its `memory.stat`. As with the limit, each figure counts the
/// group together with all groups below it.
#[derive(Debug)]
struct Files {
    limit: &'static str,
    /// A second limit, above which processes are slowed down but not killed.
    slowed_above: Option<&'static str>,
    usage: &'static str,
    /// Names of the lines for file pages. Pages of shared memory are not among them.
    cache: [&'static str; 2],
    /// Names of the lines for file pages that have to be written before they can be dropped.
    unwritten: [&'static str; 2],
    /// Caches of the kernel's that it can drop.
    slab: Option<&'static str>,
    /// The limit of what is swapped out, and how much that is.
    swap: [&'static str; 2],
    /// True if these two count memory too.
    swap_has_memory: bool,
}

static UNIFIED: Files = Files {
    limit: "memory.max",
    slowed_above: Some("memory.high"),
    usage: "memory.current",
    cache: ["active_file", "inactive_file"],
    unwritten: ["file_dirty", "file_writeback"],
    slab: Some("slab_reclaimable"),
    swap: ["memory.swap.max", "memory.swap.current"],
    swap_has_memory: false,
};

static LEGACY: Files = Files {
    limit: "memory.limit_in_bytes",
    // `memory.soft_limit_in_bytes` bounds nothing while the machine has memory.
    slowed_above: None,
    usage: "memory.usage_in_bytes",
    cache: ["total_active_file", "total_inactive_file"],
    unwritten: ["total_dirty", "total_writeback"],
    slab: None,
    swap: ["memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"],
    swap_has_memory: true,
};

/// The part of a group's cache that is not counted on. Programs and libraries that run are cache too: dropped, they
/// are read again at once. And the figures lag behind, by some pages for each CPU, and by what others take meanwhile.
const KEPT_CACHE: u64 = 8;

/// The part of a group's limit that is left alone, up to some bytes, because a page too many there is a kill. The
/// caller takes more than it asks for: samples, copies, page tables. And several callers ask at once.
const KEPT_PART: u64 = 16;
const KEPT_MOST: u64 = 64 << 20;
const FEW: u64 = 64 << 10;

impl MemoryProbe {
    /// Finds the memory control groups that this process lies in, its own and those above it.
    #[must_use]
    pub fn new() -> Self {
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        Self {
            meminfo: "/proc/meminfo".into(),
            groups: groups(&own, Path::new("/sys/fs/cgroup")),
            promises: promises(Path::new("/proc/sys/vm")),
        }
    }

    /// Reads the figures of a file in the place of `/proc/meminfo`, and of no group.
    #[cfg(test)]
    pub(crate) fn reading(meminfo: PathBuf) -> Self {
        Self { meminfo, groups: Vec::new(), promises: None }
    }

    /// The least of what the machine, its promises and every group above this process have left: without swap, and
    /// before a group is slowed down.
    #[must_use]
    pub fn available(&self) -> Available {
        self.available_beyond(4, Until::Slow)
    }

    /// Returns what is left, without `quarters` quarters of the kept part of a group's limit.
    fn available_beyond(&self, quarters: u64, until: Until) -> Available {
        let meminfo = fs::read_to_string(&self.meminfo).unwrap_or_default();
        let figure = |key| value_of(&meminfo, key).map(|kib| kib.saturating_mul(1024));
        let swap = match until {
            Until::Slow => 0,
            Until::Killed => figure("SwapFree:").unwrap_or(0),
        };
        let machine = figure("MemAvailable:").map_or(u64::MAX, |bytes| bytes.saturating_add(swap));
        let mut least = Available { bytes: machine, limit: "MemAvailable of the machine".into() };
        if let Some(kept) = self.promises
            && let Some(bytes) = promised(&meminfo, kept)
            && bytes < least.bytes
        {
            least = Available { bytes, limit: "CommitLimit of the machine (vm.overcommit_memory=2)".into() };
        }
        for group in &self.groups {
            for file in group.files.limits(until) {
                let file = group.path.join(file);
                if let Some(bytes) = group.available(&file, quarters, swap)
                    && bytes < least.bytes
                {
                    least = Available { bytes, limit: format!("the control group's {}", file.display()) };
                }
            }
        }
        least
    }

    /// Asks for `needed` bytes, also where others are swapped out for them. A few bytes may come out of the part that
    /// is left alone, so that code has memory to say why there is no more.
    ///
    /// # Errors
    /// [`Error::Memory`] with the figures when less is left.
    pub fn require(&self, needed: u64) -> Result<()> {
        let quarters = if needed <= FEW { 1 } else { 4 };
        let Available { bytes, limit } = self.available_beyond(quarters, Until::Killed);
        if needed > bytes {
            return Err(Error::Memory(format!(
                "a batch needs {needed} more bytes of memory, but only {bytes} are available ({limit}); use fewer workers, a \
                 smaller batch_size or prefetch_factor, or raise the limit"
            )));
        }
        Ok(())
    }
}

/// What may not happen to a process that takes the memory.
#[derive(Debug, Clone, Copy)]
enum Until {
    /// Pages are swapped out, or the group is slowed down.
    Slow,
    /// A process is killed.
    Killed,
}

impl Files {
    fn limits(&self, until: Until) -> impl Iterator<Item = &'static str> {
        let slowed_above = match until {
            Until::Slow => self.slowed_above,
            Until::Killed => None,
        };
        [Some(self.limit), slowed_above].into_iter().flatten()
    }
}

impl Group {
    /// Returns the bytes that are left below the limit in `file`, if the machine has `swap` bytes of swap.
    fn available(&self, file: &Path, quarters: u64, swap: u64) -> Option<u64> {
        let limit = read_number(file)?;
        let usage = read_number(&self.path.join(self.files.usage))?;
        let stat = fs::read_to_string(self.path.join("memory.stat")).unwrap_or_default();
        let sum = |keys: &[&str]| {
            keys.iter().fold(0u64, |sum, key| sum.saturating_add(value_of(&stat, key).unwrap_or(0)))
        };
        let Files { cache, unwritten, slab, .. } = self.files;
        let clean = sum(cache).saturating_sub(sum(unwritten));
        let droppable = clean.saturating_add(sum(slab.as_slice()));
        // Neither file pages nor what the kernel has is swapped out.
        let swappable = usage.saturating_sub(sum(cache).saturating_add(sum(slab.as_slice())));
        let swapped = swap.min(swappable).min(self.swap_left(limit, usage));
        // Usage may be above the limit for a moment, or after the limit was lowered.
        let kept = (limit / KEPT_PART).min(KEPT_MOST) * quarters / 4;
        let taken = usage.saturating_sub(swapped);
        Some((limit - kept).saturating_add(droppable - droppable / KEPT_CACHE).saturating_sub(taken))
    }

    /// Bytes that the group may still swap out; all, where the system bounds none.
    fn swap_left(&self, limit: u64, usage: u64) -> u64 {
        let [most, now] = self.files.swap.map(|name| read_number(&self.path.join(name)));
        let (Some(most), Some(now)) = (most, now) else { return u64::MAX };
        let left = most.saturating_sub(now);
        if self.files.swap_has_memory { left.saturating_sub(limit.saturating_sub(usage)) } else { left }
    }
}

/// The groups named by the text of `/proc/self/cgroup`, each with all above it, that have a limit.
fn groups(own: &str, root: &Path) -> Vec<Group> {
    let mut found = Vec::new();
    for line in own.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let (mount, files) = if controllers.is_empty() {
            (root.to_path_buf(), &UNIFIED)
        } else if controllers.split(',').any(|name| name == "memory") {
            (root.join("memory"), &LEGACY)
        } else {
            continue;
        };
        // Inside a container the path may be that of the host: what does not exist is left out, and
        // the mount's own root is the container's group.
        let full = mount.join(path.trim_start_matches('/'));
        let above = full.ancestors().take_while(|at| at.starts_with(&mount));
        for at in above {
            if files.limits(Until::Slow).any(|file| read_number(&at.join(file)).is_some()) {
                found.push(Group { path: at.to_path_buf(), files });
            }
        }
    }
    found
}

/// Returns the bytes that the system keeps back from its promises, by the settings below `root`; `None` if it promises
/// without a limit.
fn promises(root: &Path) -> Option<u64> {
    let kept = |name| read_number(&root.join(name)).unwrap_or(0).saturating_mul(1024);
    (read_number(&root.join("overcommit_memory"))? == 2)
        .then(|| kept("admin_reserve_kbytes").saturating_add(kept("user_reserve_kbytes")))
}

/// Returns the bytes that the system can still promise.
fn promised(meminfo: &str, kept: u64) -> Option<u64> {
    let figure = |key| value_of(meminfo, key).map(|kib| kib.saturating_mul(1024));
    Some(figure("CommitLimit:")?.saturating_sub(figure("Committed_AS:")?).saturating_sub(kept))
}

/// Bytes of address space that this process may still take, if `RLIMIT_AS` bounds it.
pub(crate) fn address_space_left() -> Option<u64> {
    let most = rustix::process::getrlimit(rustix::process::Resource::As).current?;
    let statm = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = statm.split_whitespace().next()?.parse().ok()?;
    Some(most.saturating_sub(pages.saturating_mul(super::page::page_size())))
}

/// A file with one number; `None` where it is missing or says `max`.
fn read_number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Returns the number after `key` in lines of `key number`.
fn value_of(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next()? == key).then(|| words.next()?.parse().ok())?
    })
}

#[cfg(test)]
mod tests;
