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
    /// [`Error::OutOfMemory`] with the figures when less is left.
    pub fn require(&self, needed: u64) -> Result<()> {
        let quarters = if needed <= FEW { 1 } else { 4 };
        let Available { bytes, limit } = self.available_beyond(quarters, Until::Killed);
        if needed > bytes {
            return Err(Error::OutOfMemory { needed, available: bytes, limit });
        }
        Ok(())
    }
}

impl Default for MemoryProbe {
    fn default() -> Self {
        Self::new()
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
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("ringloader-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).unwrap();
        dir
    }

    /// Returns what a group below `root` has left, from its files' content.
    fn left(root: &Path, own: &str, group: &str, files: &[(&str, &str)]) -> Available {
        fs::create_dir_all(root.join(group)).unwrap();
        for (name, content) in files {
            fs::write(root.join(group).join(name), content).unwrap();
        }
        MemoryProbe { meminfo: "/nowhere".into(), groups: groups(own, root), promises: None }.available()
    }

    #[test]
    fn the_nearest_limit_of_all_groups_above_counts() {
        let root = scratch("cgroup2");
        let inner = root.join("pod/container");
        fs::create_dir_all(&inner).unwrap();
        fs::write(inner.join("memory.max"), "max\n").unwrap();
        fs::write(root.join("pod/memory.max"), "1000000\n").unwrap();
        fs::write(root.join("pod/memory.current"), "900000\n").unwrap();
        fs::write(root.join("pod/memory.stat"), "anon 5\ninactive_file 80000\n").unwrap();
        let groups = groups("0::/pod/container\n", &root);
        assert_eq!(groups.len(), 1);
        let mut probe = MemoryProbe { meminfo: "/proc/meminfo".into(), groups, promises: None };
        assert_eq!(probe.available().bytes, 107_500);
        assert!(probe.available().limit.ends_with("pod/memory.max"));
        // Few bytes come out of what is left alone.
        assert!(probe.require(FEW).is_ok());
        fs::write(root.join("pod/memory.max"), "10000000\n").unwrap();
        fs::write(root.join("pod/memory.current"), "9375000\n").unwrap();
        assert!(probe.require(70_000).is_ok());
        let refused = probe.require(70_001).unwrap_err().to_string();
        assert!(refused.contains("70001") && refused.contains("70000"), "{refused}");

        // The inner one is nearer now, and its cache no help against the outer one's limit.
        fs::write(inner.join("memory.max"), "500000\n").unwrap();
        fs::write(inner.join("memory.current"), "448750\n").unwrap();
        probe.groups = super::groups("0::/pod/container\n", &root);
        assert_eq!(probe.available().bytes, 20_000);
        fs::write(inner.join("memory.stat"), "active_file 400000\n").unwrap();
        assert_eq!(probe.available().bytes, 70_000);
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_group_that_is_slowed_down_counts_for_what_is_left_and_refuses_nothing() {
        let root = scratch("high2");
        let files = [("memory.max", "max\n"), ("memory.high", "160000\n"), ("memory.current", "100000\n")];
        let slowed = left(&root, "0::/a\n", "a", &files);
        assert_eq!(slowed.bytes, 50_000);
        assert!(slowed.limit.ends_with("a/memory.high"), "{slowed:?}");
        let probe =
            MemoryProbe { meminfo: "/nowhere".into(), groups: groups("0::/a\n", &root), promises: None };
        assert!(probe.require(1 << 40).is_ok());
        // The limit that kills is nearer.
        fs::write(root.join("a/memory.max"), "144000\n").unwrap();
        assert_eq!(probe.available().bytes, 35_000);
        assert!(probe.available().limit.ends_with("a/memory.max"));
        // Usage stays above this one for as long as nothing can be dropped.
        fs::write(root.join("a/memory.high"), "90000\n").unwrap();
        assert_eq!(probe.available().bytes, 0);
        assert!(probe.require(35_000).is_ok() && probe.require(FEW).is_err());
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn cache_that_can_be_dropped_is_there_to_be_taken() {
        let root = scratch("cache2");
        let stat = "anon 600\nfile 8000\nkernel 900\nshmem 3000\nfile_mapped 70\nfile_dirty 300\nfile_writeback 100\n\
            inactive_anon 4000\nactive_anon 1\ninactive_file 800\nactive_file 4400\nunevictable 9\n\
            slab_reclaimable 800\nslab_unreclaimable 99\nslab 899\n";
        let full = [("memory.max", "9600\n"), ("memory.current", "9000\n"), ("memory.stat", stat)];
        // A sixteenth of the limit stays, and an eighth of 4400 + 800 - 300 - 100 + 800.
        assert_eq!(left(&root, "0::/a\n", "a", &full).bytes, 4900);
        let above = [("memory.current", "9100\n")];
        assert_eq!(left(&root, "0::/a\n", "a", &above).bytes, 4800);
        let unwritten = [("memory.stat", "active_file 500\nfile_dirty 900\nslab_reclaimable 80\n")];
        assert_eq!(left(&root, "0::/b\n", "b", &[&full[..2], &unwritten].concat()).bytes, 70);
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn what_can_be_swapped_out_is_there_for_who_asks() {
        let root = scratch("swap");
        fs::write(root.join("meminfo"), "MemAvailable: 900 kB\nSwapTotal: 200 kB\nSwapFree: 100 kB\n")
            .unwrap();
        let probe = |group: &str, own: &str, files: &[(&str, &str)]| {
            left(&root, own, group, files);
            MemoryProbe { meminfo: root.join("meminfo"), groups: groups(own, &root), promises: None }
        };
        let machine = probe("none", "", &[]);
        assert!(machine.require(1000 << 10).is_ok() && machine.require((1000 << 10) + 1).is_err());
        assert_eq!(machine.available().bytes, 900 << 10, "a budget is of memory alone");

        let most = |probe: &MemoryProbe| {
            let (mut granted, mut refused) = (FEW, 1 << 20);
            while granted + 1 < refused {
                let between = u64::midpoint(granted, refused);
                *if probe.require(between).is_ok() { &mut granted } else { &mut refused } = between;
            }
            granted
        };
        // A sixteenth of the limit stays.
        let stat = "active_file 150000\nfile_dirty 150000\n";
        let full = [("memory.max", "320000\n"), ("memory.current", "200000\n"), ("memory.stat", stat)];
        let unified = probe("a", "0::/a\n", &full);
        assert_eq!(most(&unified), 150_000, "all but the files' pages");
        assert_eq!(unified.available().bytes, 100_000);
        fs::write(root.join("a/memory.swap.max"), "max\n").unwrap();
        fs::write(root.join("a/memory.swap.current"), "5\n").unwrap();
        assert_eq!(most(&unified), 150_000);
        fs::write(root.join("a/memory.swap.max"), "1005\n").unwrap();
        assert_eq!(most(&unified), 101_000);
        fs::write(root.join("a/memory.stat"), "").unwrap();
        fs::write(root.join("a/memory.swap.max"), "900000\n").unwrap();
        assert_eq!(most(&unified), 100_000 + (100 << 10), "no more than the machine has");

        let files = [("memory.limit_in_bytes", "320000\n"), ("memory.usage_in_bytes", "200000\n")];
        let legacy = probe("memory", "4:memory:/x\n", &files);
        fs::write(root.join("memory/memory.memsw.limit_in_bytes"), "370000\n").unwrap();
        fs::write(root.join("memory/memory.memsw.usage_in_bytes"), "210000\n").unwrap();
        assert_eq!(most(&legacy), 140_000);
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn the_old_hierarchy_is_read_too() {
        let root = scratch("cgroup1");
        let own = "4:cpu,memory:/docker/abc\n3:pids:/x\n";
        let files = [("memory.limit_in_bytes", "4096\n"), ("memory.usage_in_bytes", "96\n")];
        assert_eq!(left(&root, own, "memory", &files).bytes, 3744);
        // Without what lies below, and with it.
        let stat = "inactive_file 1\nactive_file 2\ndirty 3\nwriteback 4\ntotal_dirty 20\ntotal_writeback 30\n\
            total_inactive_anon 5\ntotal_inactive_file 850\ntotal_active_file 800\n";
        assert_eq!(left(&root, own, "memory", &[("memory.stat", stat)]).bytes, 5144);
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn what_is_promised_counts_where_the_system_keeps_its_promises() {
        let root = scratch("promises");
        let meminfo = "MemAvailable: 9000 kB\nCommitLimit: 5000 kB\nCommitted_AS: 1000 kB\n";
        fs::write(root.join("meminfo"), meminfo).unwrap();
        let left = |mode: &str| {
            for (name, content) in [
                ("overcommit_memory", mode),
                ("admin_reserve_kbytes", "300\n"),
                ("user_reserve_kbytes", "200\n"),
            ] {
                fs::write(root.join(name), content).unwrap();
            }
            let promises = promises(&root);
            MemoryProbe { meminfo: root.join("meminfo"), groups: Vec::new(), promises }.available()
        };
        assert_eq!(left("0\n").bytes, 9000 * 1024);
        assert_eq!(left("1\n").bytes, 9000 * 1024);
        let strict = left("2\n");
        assert_eq!(strict.bytes, 3500 * 1024);
        assert!(strict.limit.contains("vm.overcommit_memory=2"), "{strict:?}");
        fs::write(root.join("meminfo"), "CommitLimit: 5000 kB\nCommitted_AS: 6000 kB\n").unwrap();
        assert_eq!(left("2\n").bytes, 0);
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn this_machine_has_memory_left() {
        let left = MemoryProbe::new().available();
        assert!(left.bytes > 1 << 20 && left.bytes < u64::MAX, "{left:?}");
    }
}
