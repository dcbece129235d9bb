//! Python objects as items of a list in shared memory.
//!
//! | file | about |
//! |---|---|
//! | `shared_items.rs` | the class |
//! | `look.rs` | reads an item, as a slot of the interpreter's |
//! | `form.rs` | an item as bytes, and back; the keys of dicts, which are written once |

pub(crate) mod form;
#[allow(unsafe_code, reason = "is called by the interpreter, without what PyO3 puts in between")]
pub(crate) mod look;
pub(crate) mod shared_items;
