//! The plan against torch's own rules, written down as directly as Rust allows.
#![cfg(not(any(ringloader_loom, ringloader_tsan)))]

mod cases;
mod generators;
mod passing;
mod reorder;
mod resuming;
mod rollover;
mod scheduling;
mod streams;
mod torch_iterator;
