//! Memory that no other processor's writes invalidate.

/// A value on cache lines of its own: two, since processors fetch them in pairs.
///
/// INVARIANT: a part of the shared layout, so its alignment is the same for every target and version.
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub struct CachePadded<T>(pub T);
