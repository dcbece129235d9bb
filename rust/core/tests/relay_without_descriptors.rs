//! A process that has no descriptor left for a caller: its relay waits, and lets the caller in when there is one again.
//! A test binary of its own, since the limit is the process's.
#![cfg(all(target_os = "linux", not(ringloader_portable), not(ringloader_loom)))]

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::time::Duration;

use ringloader_core::transport::engine::Engine;
use ringloader_core::transport::relay::Beats;
use ringloader_core::transport::relay::main_end::MainRelay;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};

/// The processor time of this process.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[test]
fn the_thread_does_not_spin() {
    let engine = Engine::new(1, 4, 4 << 20).unwrap();
    let main =
        MainRelay::new(&engine, IpAddr::V4(Ipv4Addr::LOCALHOST), [42; 32], None, Beats::default()).unwrap();
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(256), ..limit }).unwrap();
    let mut others = Vec::new();
    while let Ok(other) = File::open("/dev/null") {
        others.push(other);
    }
    // The caller's end takes the last one.
    others.pop();
    let mut caller = TcpStream::connect(main.address()).unwrap();
    caller.write_all(&[1; 64]).unwrap();

    let before = processor_time();
    std::thread::sleep(Duration::from_secs(1));
    let used = processor_time() - before;
    assert!(used < Duration::from_millis(300), "{used:?}");

    drop(others);
    // The relay lets the caller in, hears it, and closes it, as it names no worker.
    caller.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    match caller.read(&mut [0; 1]) {
        Ok(count) => assert_eq!(count, 0),
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
    }
    setrlimit(Resource::Nofile, limit).unwrap();
}
