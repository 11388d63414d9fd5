"""The op table of MTIA: torch's list for accelerators, as it is."""

from polycast import STANDARD_POLICIES

POLICIES = STANDARD_POLICIES
