"""Lightning's own tests of ``ModelParallelStrategy``, from a checkout of its sources, run with ``accelpact_hsdp``."""
