//! Maps whose keys are objects' addresses.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map from the addresses of objects that are alive, and kept so.
pub(crate) type ByIdentity<V> = HashMap<usize, V, BuildHasherDefault<AddressHasher>>;

/// Spreads addresses over a table. No attacker chooses them, so no secret is needed.
#[derive(Default)]
pub(crate) struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _bytes: &[u8]) {
        unreachable!("an address is one usize");
    }

    fn write_usize(&mut self, address: usize) {
        // 2^64 divided by the golden ratio; the table takes bits from both ends of the product.
        let spread = (address as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = spread ^ (spread >> 32);
    }
}
