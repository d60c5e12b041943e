"""FailBench: what failures cost, by architecture, mechanism and trace of faults; see ``docs/failbench.md``."""
