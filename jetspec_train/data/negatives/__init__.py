"""Hard negatives: drafted or edited continuations of the target's answers, each judged by the target (METHODS 6)."""
