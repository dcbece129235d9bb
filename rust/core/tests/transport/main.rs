//! Engine and port in one process: what happens at the edges of slots, leases and succession.
#![cfg(all(target_os = "linux", not(ringloader_portable), not(ringloader_loom)))]

mod both_ends;
mod own_segments;
mod registered;
mod slots;
mod stored;
mod successors;
