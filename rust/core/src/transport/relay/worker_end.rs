//! The worker's end: the rings of a local worker in its process, and two threads between them and the connection.

use std::io::{BufReader, Read, Write};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use zerocopy::IntoBytes;

use super::frame::{FrameHeader, FrameKind, HEADER};
use super::handshake::{CHALLENGE, Hello};
use super::{Beats, Identity, usize_from};
use crate::error::{Error, Result};
use crate::os::clock::monotonic;
use crate::os::sockets;
use crate::sync::{Arc, AtomicBool, AtomicU64, Lock, Ordering};
use crate::transport::engine::Engine;
use crate::transport::message::{ResultKind, Task, TaskKind};
use crate::transport::port::Port;
use crate::transport::received::Received;
use crate::transport::{LONGEST_SLEEP, Transport};

/// The longest bytes of a task: more were not sent by a main process.
const LONGEST_TASK: u64 = 1 << 32;

/// The relay of a worker, in its process.
#[derive(Debug)]
pub struct WorkerRelay {
    shared: Arc<WorkerShared>,
    socket: TcpStream,
    threads: Lock<Vec<JoinHandle<()>>>,
}

#[derive(Debug)]
struct WorkerShared {
    engine: Engine,
    /// Nothing comes after what is committed.
    is_finished: AtomicBool,
    /// The connection has ended.
    is_lost: AtomicBool,
    /// The main process's question for this clock, and when it came; none if it is 0.
    asked: Lock<(u64, u64)>,
    /// The task whose answer ends the worker's part of the epoch.
    last: AtomicU64,
}

fn io(call: &'static str) -> impl Fn(std::io::Error) -> Error {
    move |error| Error::io(call, &error)
}

impl WorkerRelay {
    /// Connects to the main process, with rings for `max_tasks` tasks and `share` bytes of memory.
    ///
    /// # Errors
    /// [`Error::Os`] when there is no way to the main process within `limit`, or the system refuses what it needs.
    pub fn connect(
        host: &str,
        port: u16,
        identity: Identity,
        max_tasks: u32,
        share: u64,
        limit: Duration,
        beats: Beats,
    ) -> Result<Self> {
        let failed = io("connecting to the main process");
        let mut last = None;
        let mut connected = None;
        for address in (host, port).to_socket_addrs().map_err(&failed)? {
            match TcpStream::connect_timeout(&address, limit) {
                Ok(socket) => {
                    connected = Some(socket);
                    break;
                }
                Err(error) => last = Some(error),
            }
        }
        let Some(mut socket) = connected else {
            return Err(failed(last.unwrap_or_else(|| std::io::ErrorKind::NotFound.into())));
        };
        socket.set_nodelay(true).map_err(&failed)?;
        sockets::fit(&socket);
        let mut challenge = [0; CHALLENGE];
        let limit = limit.max(Duration::from_micros(1));
        socket.set_read_timeout(Some(limit)).map_err(&failed)?;
        socket.read_exact(&mut challenge).map_err(&failed)?;
        socket.write_all(Hello::new(&challenge, &identity).as_bytes()).map_err(&failed)?;
        // A main process that lives gives signs of life, whatever it waits for.
        socket.set_read_timeout(Some(beats.lost_after)).map_err(&failed)?;
        let shared = Arc::new(WorkerShared {
            engine: Engine::new(1, max_tasks, share)?,
            is_finished: AtomicBool::new(false),
            is_lost: AtomicBool::new(false),
            asked: Lock::new((0, 0)),
            last: AtomicU64::new(u64::MAX),
        });
        let relay = Self {
            shared: shared.clone(),
            socket: socket.try_clone().map_err(&failed)?,
            threads: Lock::default(),
        };
        let reading = socket.try_clone().map_err(&failed)?;
        let receiver = Receiver { shared: shared.clone(), socket: BufReader::new(reading) };
        relay.start("ringloader-receive", move || receiver.run())?;
        let sender = Sender { shared, socket, beats, beat: Instant::now(), epoch: 0 };
        relay.start("ringloader-send", move || sender.run())?;
        Ok(relay)
    }

    fn start(&self, name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = std::thread::Builder::new().name(name.into()).spawn(run);
        let thread = thread.map_err(io("starting a relay's thread")).inspect_err(|_| self.abandon())?;
        self.threads.lock().push(thread);
        Ok(())
    }

    /// The worker's end of the rings. Once.
    ///
    /// # Errors
    /// As [`Port::attach`].
    pub fn port(&self) -> Result<Port> {
        let WorkerShared { engine, .. } = &*self.shared;
        let fds = engine.inherited_fds(0).map_err(io("taking the rings' descriptors"))?;
        Port::attach(engine.control().clone(), 0, engine.share(), fds, None)
    }

    /// The answer to this task will be the worker's last in this epoch.
    pub fn end_part(&self, seq: u64) {
        // The ring publishes it, with the commit of that answer, which comes after it in the same thread.
        self.shared.last.store(seq, Ordering::Relaxed);
    }

    /// Returns true if the connection has ended before the worker was told to end.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.shared.is_lost.load(Ordering::Relaxed)
    }

    /// Sends what is committed, and ends the connection. Waits for the main process to take it all.
    pub fn finish(&self) {
        // ORDERING finished: the rings order what was committed before.
        self.shared.is_finished.store(true, Ordering::Release);
        self.shared.engine.wake();
        self.join();
    }

    fn abandon(&self) {
        let _ = self.socket.shutdown(Shutdown::Both);
        self.shared.is_finished.store(true, Ordering::Release);
        self.shared.engine.wake();
    }

    fn join(&self) {
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            let _ = thread.join();
        }
    }
}

impl Drop for WorkerRelay {
    fn drop(&mut self) {
        self.abandon();
        self.join();
    }
}

impl WorkerShared {
    /// The connection has ended: the worker loop is to end, too.
    fn lose(&self) {
        self.is_lost.store(true, Ordering::Relaxed);
        self.engine.set_done();
        let _ = self.engine.put(0, Task { seq: 0, kind: TaskKind::End, bytes: Vec::new() });
        self.engine.wake();
    }
}

/// Takes tasks from the connection.
struct Receiver {
    shared: Arc<WorkerShared>,
    socket: BufReader<TcpStream>,
}

impl Receiver {
    fn run(mut self) {
        while self.take().is_ok() {}
        if !self.shared.is_finished.load(Ordering::Acquire) {
            self.shared.lose();
        }
        // The other thread may wait for the main process to take what it sends.
        let _ = self.socket.get_ref().shutdown(Shutdown::Both);
    }

    /// Takes one frame.
    ///
    /// # Errors
    /// When the connection has ended, or has sent what no main process sends.
    fn take(&mut self) -> Result<()> {
        let mut bytes = [0; HEADER];
        self.socket.read_exact(&mut bytes).map_err(io("receiving a task"))?;
        let FrameHeader { kind, of, seq, len, at, .. } = FrameHeader::read(&bytes).map_err(Error::Corrupt)?;
        match kind {
            FrameKind::Task => {
                let kind = TaskKind::from_number(of.into())
                    .filter(|_| len.get() <= LONGEST_TASK)
                    .ok_or_else(|| Error::Corrupt(format!("a task of kind {of} and {len} bytes")))?;
                let mut bytes = vec![0; usize_from(len.get())];
                self.socket.read_exact(&mut bytes).map_err(io("receiving a task"))?;
                self.shared.engine.put(0, Task { seq: seq.get(), kind, bytes })
            }
            FrameKind::Ping => {
                let asked = (at[0].get(), monotonic());
                *self.shared.asked.lock() = asked;
                self.shared.engine.wake();
                Ok(())
            }
            FrameKind::Done => {
                self.shared.engine.set_done();
                Ok(())
            }
            kind => Err(Error::Corrupt(format!("a worker was sent a {kind:?}"))),
        }
    }
}

/// Sends results and signs of life.
struct Sender {
    shared: Arc<WorkerShared>,
    socket: TcpStream,
    beats: Beats,
    /// When the last sign of life was given.
    beat: Instant,
    /// Epochs that the results sent have begun after the first.
    epoch: u64,
}

impl Sender {
    fn run(mut self) {
        if self.serve().is_err() && !self.shared.is_finished.load(Ordering::Acquire) {
            self.shared.lose();
        }
        // The other thread waits in it.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    fn serve(&mut self) -> Result<()> {
        loop {
            // ORDERING finished: looked at first, so that all that was committed before is found.
            let is_finished = self.shared.is_finished.load(Ordering::Acquire);
            while let Some(result) = self.shared.engine.try_next_of(0)? {
                self.send(&result)?;
            }
            if is_finished {
                return Ok(());
            }
            self.give_sign()?;
            let left = self.beats.every.saturating_sub(self.beat.elapsed());
            self.shared.engine.wait_for(Some(0), left.min(LONGEST_SLEEP))?;
            self.shared.engine.take_wake();
        }
    }

    /// Gives a sign of life, if it is time, or was asked for.
    fn give_sign(&mut self) -> Result<()> {
        let asked = std::mem::take(&mut *self.shared.asked.lock());
        if asked.0 == 0 && self.beat.elapsed() < self.beats.every {
            return Ok(());
        }
        let header = FrameHeader::with_moments(FrameKind::Beat, [asked.0, asked.1, monotonic()]);
        self.write(&header)
    }

    fn send(&mut self, result: &Received) -> Result<()> {
        let counts = self.shared.engine.control().worker(0).counters.read(self.epoch);
        // See `end_part`.
        let ends_part =
            result.kind == ResultKind::Batch && self.shared.last.load(Ordering::Relaxed) == result.seq;
        let at = [result.meta_offset, result.table().len() as u64, result.generation];
        let header = FrameHeader {
            ends_part,
            of: result.kind as u8,
            seq: result.seq.into(),
            len: result.len().into(),
            counts: counts.map(|(_, count)| count.into()),
            ..FrameHeader::with_moments(FrameKind::Result, at)
        };
        let header = header.as_bytes();
        let mut gone = 0;
        while gone < HEADER as u64 + result.len() {
            // One call, and for a small batch one packet, so that the main process wakes up once.
            let of_header = gone.min(HEADER as u64);
            match result.send(self.socket.as_fd(), &header[usize_from(of_header)..], gone - of_header)? {
                Ok(sent) => gone += sent as u64,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(io("sending a batch")(error)),
            }
        }
        self.epoch += u64::from(result.kind == ResultKind::Object);
        self.beat = Instant::now();
        Ok(())
    }

    fn write(&mut self, header: &FrameHeader) -> Result<()> {
        self.socket.write_all(header.as_bytes()).map_err(io("sending to the main process"))?;
        self.beat = Instant::now();
        Ok(())
    }
}
