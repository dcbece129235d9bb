"""Test programs: Python processes of their own, forked from a warm server or started cold."""

import struct

# How a server writes a program's pid, and later its wait status, into the program's status pipe.
NUMBER = struct.Struct("i")
