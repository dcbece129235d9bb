//! Segments are made by the parent and attached by workers.
#![forbid(unsafe_code)]

use std::os::fd::OwnedFd;

use rustix::io::Errno;

use super::control::Control;
use super::geometry::Geometry;
use super::views::header;
use crate::error::{Error, Result};
use crate::os::Segment;
use crate::os::memory::address_space_left;
use crate::process;
use crate::sync::Ordering;

impl Control {
    /// Makes a segment for `geometry`, with smaller windows and arenas where the system refuses so much address
    /// space or so large a file, or it were more than half of what `RLIMIT_AS` leaves for all that this process does.
    /// The descriptor is for the processes that attach.
    ///
    /// # Errors
    /// [`Error::Os`] when the system gives no segment.
    pub fn create(mut geometry: Geometry) -> Result<(Self, OwnedFd)> {
        let most = address_space_left().map_or(u64::MAX, |left| left / 2);
        let (segment, fd) = loop {
            if geometry.total() > most
                && let Some(smaller) = geometry.halved()
            {
                geometry = smaller;
                continue;
            }
            match Segment::create("ringloader", geometry.total()) {
                Err(Error::Os { errno, call, message })
                    if [Errno::NOMEM, Errno::FBIG].map(Errno::raw_os_error).contains(&errno) =>
                {
                    geometry = geometry.halved().ok_or(Error::Os { errno, call, message })?;
                }
                other => break other?,
            }
        };
        let control = Self::over(segment, geometry, Some(process::current()))?;
        for (word, value) in control.views.header.geometry.iter().zip(geometry.words()) {
            word.store(value, Ordering::Relaxed);
        }
        Ok((control, fd))
    }

    /// Reads the geometry of a segment that another process made.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when it is none of this version's.
    pub fn attach(segment: Segment) -> Result<Self> {
        let header = header(&segment)?;
        let words = std::array::from_fn(|i| header.geometry[i].load(Ordering::Relaxed));
        let geometry = Geometry::from_words(words, segment.len())?;
        Self::over(segment, geometry, None)
    }
}
