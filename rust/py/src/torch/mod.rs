//! torch's and numpy's objects: their names, what lies behind them, tensors over memory.

#[allow(unsafe_code, reason = "reads torch's table of C functions")]
pub(crate) mod abi;
#[allow(unsafe_code, reason = "reads numpy's description of an array")]
pub(crate) mod array;
#[allow(unsafe_code, reason = "drops what torch's deleters were called for")]
pub(crate) mod deferred;
#[allow(unsafe_code, reason = "reads torch's description of a tensor")]
pub(crate) mod describe;
#[allow(unsafe_code, reason = "writes and drops the structure that torch is given")]
pub(crate) mod header;
#[allow(unsafe_code, reason = "allocates")]
pub(crate) mod memory;
#[allow(unsafe_code, reason = "calls the C functions of torch's methods")]
pub(crate) mod method;
pub(crate) mod names;
#[allow(unsafe_code, reason = "copies a batch's bytes out")]
pub(crate) mod source;
#[allow(unsafe_code, reason = "hands memory to torch and takes it back")]
pub(crate) mod tensor;
