#!/bin/sh
# Calls the compiler with the flag of systems without memfd. As the workspace's wrapper it compiles only our own crates
# anew, where RUSTFLAGS would compile all.
exec "$@" --cfg ringloader_portable
