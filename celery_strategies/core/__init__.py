"""Own the scheduling decisions, as functions of values.

Standard library only. Nothing in here reads a clock, does I/O, or imports another part of the
package: what these modules decide can be tested, and simulated, without Redis.
"""
