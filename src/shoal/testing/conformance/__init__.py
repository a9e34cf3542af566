"""The cases of the conformance suite of groups; `shoal.testing.groups` is the way in."""
