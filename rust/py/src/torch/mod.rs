//! Objects of torch and numpy: their names, their memory, tensors over memory.
//!
//! | file | about |
//! |---|---|
//! | `names.rs` | the parts of torch, numpy and pickle that are used here |
//! | `abi.rs` | torch's C functions and their structures |
//! | `elements.rs` | the elements of tensors and arrays in memory |
//! | `memory.rs` | memory for tensors that own their bytes |
//! | `source.rs` | the bytes that tensors are made of |
//! | `header.rs` | the structure that torch gets with a tensor, and how it is dropped |
//! | `tensor.rs` | tensors over memory |

#[allow(unsafe_code, reason = "reads torch's table of C functions, and calls those of methods")]
pub(crate) mod abi;
#[allow(unsafe_code, reason = "reads torch's and numpy's descriptions of tensors and arrays")]
pub(crate) mod elements;
#[allow(unsafe_code, reason = "writes and drops the structure that torch is given")]
pub(crate) mod header;
#[allow(unsafe_code, reason = "allocates")]
pub(crate) mod memory;
pub(crate) mod names;
#[allow(unsafe_code, reason = "copies a batch's bytes out")]
pub(crate) mod source;
#[allow(unsafe_code, reason = "hands memory to torch and takes it back")]
pub(crate) mod tensor;
