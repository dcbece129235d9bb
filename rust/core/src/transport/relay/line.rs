//! The worker's side of a connection, over which two threads send: the relay's, and the worker's own, which begins large
//! batches.
//!
//! A batch in memory of the worker's own is copied into its slot, and from there to the connection. Within a machine a
//! connection takes bytes about as fast as a slot does. So there the worker's thread sends them from where they are, for
//! as long as the connection takes them, and copies only the rest.
//!
//! INVARIANT L1: frames go whole, in the order of their commits. One thread at a time has the socket. The worker's thread
//! gets it only once all results that are committed were sent. The frame that it begins is that of the next commit, and
//! the relay's thread ends it. If another result is committed next, the connection ends.

use std::net::TcpStream;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use super::frame::HEADER;
use crate::error::{Error, Result};
use crate::os::sockets;
use crate::sync::Arc;
use crate::transport::message::ResultKind;
use crate::transport::received::Received;

/// For how long the worker's thread may wait for the connection in all, whatever it takes.
const PATIENCE: Duration = Duration::from_millis(4);

/// The bytes per second that the connection must take for the worker's thread to wait longer.
const RATE: u64 = 256 << 20;

#[derive(Debug)]
pub(super) struct Line {
    state: Mutex<State>,
    /// The socket has come back.
    is_back: Condvar,
    /// Both ends are on this machine.
    is_within: bool,
}

#[derive(Debug)]
struct State {
    /// `None` while the worker's thread has it.
    socket: Option<TcpStream>,
    /// Results that were sent.
    sent: u64,
    /// Epochs that these have begun after the first.
    epoch: u64,
    /// The frame that the worker's thread has begun, until the relay's thread ends it.
    begun: Option<Place>,
}

/// The part of a result's frame that has gone.
#[derive(Debug, Clone, Copy)]
struct Place {
    /// The number of the result's filling.
    generation: u64,
    /// Bytes of the frame, those of its header among them.
    gone: u64,
}

fn failed(error: &std::io::Error) -> Error {
    Error::io("sending to the main process", error)
}

impl Line {
    pub(super) fn new(socket: TcpStream, is_within: bool) -> Self {
        Self {
            state: Mutex::new(State { socket: Some(socket), sent: 0, epoch: 0, begun: None }),
            is_back: Condvar::new(),
            is_within,
        }
    }

    /// Waits for the socket.
    fn lock(&self) -> MutexGuard<'_, State> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let is_away = |state: &mut State| state.socket.is_none();
        self.is_back.wait_while(state, is_away).unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a frame without content.
    ///
    /// # Errors
    /// [`Error::Os`] when the connection has ended.
    pub(super) fn send_header(&self, header: &[u8; HEADER]) -> Result<()> {
        let state = self.lock();
        if state.begun.is_some() {
            // A frame is on its way: the bytes of its rest are a sign of life, too.
            return Ok(());
        }
        let Some(socket) = &state.socket else { return Ok(()) };
        std::io::Write::write_all(&mut &*socket, header).map_err(|error| failed(&error))
    }

    /// Sends a result, or the rest of it. `header`: of the frame, by the number of the epoch.
    ///
    /// # Errors
    /// [`Error::Os`] when the connection has ended; [`Error::Corrupt`] when the frame of another result was begun.
    pub(super) fn send(&self, result: &Received, header: impl FnOnce(u64) -> [u8; HEADER]) -> Result<()> {
        let mut state = self.lock();
        let header = header(state.epoch);
        let mut gone = match state.begun.take() {
            None => 0,
            Some(place) if place.generation == result.generation => place.gone,
            Some(_) => return Err(Error::Corrupt("a batch was begun and not committed".into())),
        };
        let Some(socket) = &state.socket else { return Ok(()) };
        while gone < HEADER as u64 + result.len() {
            // One call, and for a small batch one packet, so that the main process wakes up once.
            let of_header = gone.min(HEADER as u64);
            match result.send(socket.as_fd(), &header[of_header as usize..], gone - of_header)? {
                Ok(sent) => gone += sent as u64,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(failed(&error)),
            }
        }
        state.sent += 1;
        state.epoch += u64::from(result.kind == ResultKind::Object);
        Ok(())
    }

    /// Takes the socket for the frame of the next result, which is the one after `committed` others; `None` where it is to
    /// be sent from its slot.
    pub(super) fn begin(
        line: &Arc<Self>,
        committed: u64,
        generation: u64,
        header: impl FnOnce(u64) -> [u8; HEADER],
    ) -> Option<Begun> {
        if !line.is_within {
            return None;
        }
        let mut state = match line.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        if state.sent != committed || state.begun.is_some() {
            return None;
        }
        let socket = state.socket.take()?;
        let header = header(state.epoch);
        let place = Place { generation, gone: 0 };
        let began = Instant::now();
        Some(Begun { line: line.clone(), socket: Some(socket), header, place, began, is_stopped: false })
    }
}

/// The frame of a result whose first bytes are being sent. Dropped, it leaves the rest to the relay's thread.
#[derive(Debug)]
pub struct Begun {
    line: Arc<Line>,
    socket: Option<TcpStream>,
    header: [u8; HEADER],
    place: Place,
    began: Instant,
    is_stopped: bool,
}

impl Begun {
    /// Returns the number of the batch's bytes that have gone.
    #[must_use]
    pub fn gone(&self) -> u64 {
        self.place.gone.saturating_sub(HEADER as u64)
    }

    /// Sends the batch's next `len` bytes, which are at `from`, as long as the connection takes them. Returns how many
    /// have gone. Once it was fewer, nothing more goes.
    ///
    /// # Safety
    /// The bytes can be read until the return.
    pub unsafe fn send(&mut self, from: NonNull<u8>, len: u64) -> u64 {
        let start = self.gone();
        loop {
            let done = self.gone() - start;
            let Some(socket) = self.socket.as_ref().filter(|_| done < len && !self.is_stopped) else {
                return done;
            };
            let before = &self.header[self.place.gone.min(HEADER as u64) as usize..];
            // SAFETY: the caller's, of `len` bytes.
            let sent =
                unsafe { sockets::send_now(socket.as_fd(), before, from.add(done as usize), len - done) };
            match sent {
                Ok(sent) => self.place.gone += sent as u64,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => self.wait(),
                // The relay's thread meets the error, too.
                Err(_) => self.is_stopped = true,
            }
        }
    }

    /// As [`send`](Self::send), of bytes that nobody writes to.
    #[cfg(test)]
    pub(super) fn send_bytes(&mut self, bytes: &[u8]) -> usize {
        // SAFETY: they are borrowed for the call.
        unsafe { self.send(NonNull::from(bytes).cast(), bytes.len() as u64) as usize }
    }

    /// Waits until the connection takes more, if it is worth it.
    fn wait(&mut self) {
        let limit = PATIENCE + Duration::from_micros(self.gone() / (RATE / 1_000_000));
        let left = limit.saturating_sub(self.began.elapsed());
        let waited = self.socket.as_ref().map(|socket| sockets::wait_to_send(socket.as_fd(), left));
        self.is_stopped = left.is_zero() || !matches!(waited, Some(Ok(())));
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        let mut state = self.line.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.begun = Some(self.place).filter(|place| place.gone > 0);
        state.socket = self.socket.take();
        self.line.is_back.notify_all();
    }
}
