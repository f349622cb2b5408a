"""From a spec to its chunk form: rewriting, derivation, adjoints, proofs, verdicts."""
