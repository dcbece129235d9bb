//! How much memory can still be taken before the system kills rather than refuses.
//!
//! At its limit a control group's process gets SIGKILL, never an error, so whoever is about to touch
//! new pages asks first.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// What is left, and which limit says so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Available {
    /// Bytes that can still be taken.
    pub bytes: u64,
    /// The limit that is nearest, for messages.
    pub limit: String,
}

/// Where the figures are read. The groups of a process do not change while it loads data.
#[derive(Debug, Clone)]
pub struct MemoryProbe {
    meminfo: PathBuf,
    groups: Vec<Group>,
}

#[derive(Debug, Clone)]
struct Group {
    path: PathBuf,
    limit: &'static str,
    usage: &'static str,
    /// The key in `memory.stat` of file pages that can be dropped.
    reclaimable: &'static str,
}

impl MemoryProbe {
    /// Finds the memory control groups that this process lies in, its own and those above it.
    #[must_use]
    pub fn new() -> Self {
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        Self { meminfo: "/proc/meminfo".into(), groups: groups(&own, Path::new("/sys/fs/cgroup")) }
    }

    /// The least of what the machine and every group above this process have left.
    #[must_use]
    pub fn available(&self) -> Available {
        let meminfo = fs::read_to_string(&self.meminfo).unwrap_or_default();
        let machine = value_of(&meminfo, "MemAvailable:").map_or(u64::MAX, |kib| kib.saturating_mul(1024));
        let mut least = Available { bytes: machine, limit: "MemAvailable of the machine".into() };
        for group in &self.groups {
            if let Some(bytes) = group.available()
                && bytes < least.bytes
            {
                let file = group.path.join(group.limit);
                least = Available { bytes, limit: format!("the control group's {}", file.display()) };
            }
        }
        least
    }

    /// Asks for `needed` bytes.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] with the figures when less is left.
    pub fn require(&self, needed: u64) -> Result<()> {
        let Available { bytes, limit } = self.available();
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

impl Group {
    fn available(&self) -> Option<u64> {
        let limit = read_number(&self.path.join(self.limit))?;
        let usage = read_number(&self.path.join(self.usage))?;
        let stat = fs::read_to_string(self.path.join("memory.stat")).unwrap_or_default();
        let reclaimable = value_of(&stat, self.reclaimable).unwrap_or(0);
        Some(limit.saturating_sub(usage).saturating_add(reclaimable))
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
        let (mount, limit, usage, reclaimable) = if controllers.is_empty() {
            (root.to_path_buf(), "memory.max", "memory.current", "inactive_file")
        } else if controllers.split(',').any(|name| name == "memory") {
            let mount = root.join("memory");
            (mount, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        } else {
            continue;
        };
        // Inside a container the path may be that of the host: what does not exist is left out, and
        // the mount's own root is the container's group.
        let full = mount.join(path.trim_start_matches('/'));
        let above = full.ancestors().take_while(|at| at.starts_with(&mount));
        for at in above {
            if read_number(&at.join(limit)).is_some() {
                found.push(Group { path: at.to_path_buf(), limit, usage, reclaimable });
            }
        }
    }
    found
}

/// A file with one number; `None` where it is missing or says `max`.
fn read_number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The number behind `key` in lines of `key number`.
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

    #[test]
    fn the_nearest_limit_of_all_groups_above_counts() {
        let root = scratch("cgroup2");
        let inner = root.join("pod/container");
        fs::create_dir_all(&inner).unwrap();
        fs::write(inner.join("memory.max"), "max\n").unwrap();
        fs::write(root.join("pod/memory.max"), "1000000\n").unwrap();
        fs::write(root.join("pod/memory.current"), "900000\n").unwrap();
        fs::write(root.join("pod/memory.stat"), "anon 5\ninactive_file 50000\n").unwrap();
        let groups = groups("0::/pod/container\n", &root);
        assert_eq!(groups.len(), 1);
        let probe = MemoryProbe { meminfo: "/proc/meminfo".into(), groups };
        assert_eq!(probe.available().bytes, 150_000);
        assert!(probe.available().limit.ends_with("pod/memory.max"));
        assert!(probe.require(150_000).is_ok());
        let refused = probe.require(150_001).unwrap_err().to_string();
        assert!(refused.contains("150001") && refused.contains("150000"), "{refused}");
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn the_old_hierarchy_is_read_too() {
        let root = scratch("cgroup1");
        fs::create_dir_all(root.join("memory")).unwrap();
        fs::write(root.join("memory/memory.limit_in_bytes"), "4096\n").unwrap();
        fs::write(root.join("memory/memory.usage_in_bytes"), "96\n").unwrap();
        let groups = groups("4:cpu,memory:/docker/abc\n3:pids:/x\n", &root);
        let probe = MemoryProbe { meminfo: "/proc/meminfo".into(), groups };
        assert_eq!(probe.available().bytes, 4000);
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn this_machine_has_memory_left() {
        let left = MemoryProbe::new().available();
        assert!(left.bytes > 1 << 20 && left.bytes < u64::MAX, "{left:?}");
    }
}
