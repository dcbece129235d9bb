//! Python objects as items of a list in shared memory.
//!
//! | file | about |
//! |---|---|
//! | `shared_items.rs` | the class |
//! | `form.rs` | an item as bytes, and back; the keys of dicts, which are written once |

pub(crate) mod form;
pub(crate) mod shared_items;
