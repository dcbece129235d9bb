//! Segments are made by the parent and attached by workers.
#![forbid(unsafe_code)]

use std::os::fd::OwnedFd;

use rustix::io::Errno;

use super::control::Control;
use super::geometry::Geometry;
use super::views::header;
use crate::error::{Error, Result};
use crate::os::Segment;
use crate::process;
use crate::sync::Ordering;

impl Control {
    /// Makes a segment for `geometry`, with smaller windows where the system refuses so much address
    /// space. The descriptor is for those that attach.
    ///
    /// # Errors
    /// [`Error::Os`] when no segment can be had.
    pub fn create(mut geometry: Geometry) -> Result<(Self, OwnedFd)> {
        let (segment, fd) = loop {
            match Segment::create("ringloader", geometry.total()) {
                Err(Error::Os { errno, .. }) if errno == Errno::NOMEM.raw_os_error() => {
                    geometry = geometry.halved().ok_or_else(|| Error::os("mmap", Errno::NOMEM))?;
                }
                other => break other?,
            }
        };
        let control = Self::over(segment, geometry, Some(process::current()))?;
        for (word, value) in control.header().geometry.iter().zip(geometry.words()) {
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
