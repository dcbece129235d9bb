//! A batch: Python objects to leaves and a skeleton, and back.

pub(crate) mod decode;
pub(crate) mod encode;
pub(crate) mod groups;
pub(crate) mod layout;
pub(crate) mod leaves;
pub(crate) mod limits;
pub(crate) mod pickling;
#[allow(unsafe_code, reason = "vouches for the addresses that are copied between")]
pub(crate) mod pin;
pub(crate) mod template;
#[allow(unsafe_code, reason = "copies from objects' memory by its address")]
pub(crate) mod write;
