"""Test programs: Python processes of their own, forked from a warm server or started cold."""

import struct

# The form in which a server writes a program's pid, and later its wait status, into its status pipe.
NUMBER = struct.Struct("i")
