//! Strangers that call a relay take few of its process's descriptors. Where the process has none left for a caller, the
//! relay waits, and lets the caller in when there is one again. One test, since descriptors are the process's.
#![cfg(all(target_os = "linux", not(ringloader_portable), not(ringloader_loom)))]

use std::fs::File;
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::time::Duration;

use ringloader_core::transport::engine::Engine;
use ringloader_core::transport::relay::main_end::{MainRelay, Standing};
use ringloader_core::transport::relay::worker_end::WorkerRelay;
use ringloader_core::transport::relay::{Beats, Identity};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};

/// The processor time of this process.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn strangers_take_few_descriptors_and_the_thread_does_not_spin_without_any() {
    let engine = Engine::new(1, 4, 4 << 20).unwrap();
    let host = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let main = MainRelay::new(&engine, host, [42; 32], None, Beats::default()).unwrap();
    let number = main.expect(&engine, 0, None).unwrap();
    let few = descriptors() + 2 + 16;
    let mut strangers: Vec<_> = (0..300).map(|_| TcpStream::connect(main.address()).unwrap()).collect();
    // The last one was let in, once the ones before were dropped.
    assert_eq!(strangers.last_mut().unwrap().read(&mut [0; 32]).unwrap(), 32);
    let taken = descriptors() - strangers.len();
    assert!(taken <= few, "{taken} descriptors, not {few}");

    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(600), ..limit }).unwrap();
    let mut others = Vec::new();
    while let Ok(other) = File::open("/dev/null") {
        others.push(other);
    }
    // The caller's end takes the last one.
    others.pop();
    let mut caller = TcpStream::connect(main.address()).unwrap();

    let before = processor_time();
    std::thread::sleep(Duration::from_secs(1));
    let used = processor_time() - before;
    assert!(used < Duration::from_millis(300), "{used:?}");

    drop(others);
    caller.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    assert_eq!(caller.read(&mut [0; 32]).unwrap(), 32, "the relay lets the caller in");
    setrlimit(Resource::Nofile, limit).unwrap();

    let (host, port) = (host.to_string(), main.address().port());
    let identity = Identity { token: [42; 32], worker: 0, number };
    let patience = Duration::from_secs(60);
    let worker = WorkerRelay::connect(&host, port, identity, 4, 4 << 20, patience, Beats::default()).unwrap();
    assert_eq!(main.standing(0, number, patience), Standing::Connected);
    // Nobody is expected: nobody is let in, and who was is closed.
    assert_eq!(caller.read(&mut [0; 32]).unwrap(), 0);
    let before = descriptors();
    strangers.extend((0..50).map(|_| TcpStream::connect(main.address()).unwrap()));
    std::thread::sleep(Duration::from_millis(300));
    // Some that were closed may have been counted before.
    assert!(descriptors() <= before + 50);
    drop(worker);
}
