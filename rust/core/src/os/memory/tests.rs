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
    let probe = MemoryProbe { meminfo: "/nowhere".into(), groups: groups("0::/a\n", &root), promises: None };
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
    fs::write(root.join("meminfo"), "MemAvailable: 900 kB\nSwapTotal: 200 kB\nSwapFree: 100 kB\n").unwrap();
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
        for (name, content) in
            [("overcommit_memory", mode), ("admin_reserve_kbytes", "300\n"), ("user_reserve_kbytes", "200\n")]
        {
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
