"""FailBench: what failures cost, for each architecture of distributed training, mechanism and trace; see ``docs/failbench.md``."""
