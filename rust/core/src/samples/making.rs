//! The samples that threads of this process are making.

use std::collections::HashSet;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::process::{self, Process};

E
ls; grep -n "AtomicPtr" -r rust/core/src | head; grep -n "samples::\|Samples" rust/py/src/cache/mod.rs | head
