"""Framework-neutral recovery: imports torch and the standard library only, never lightning or accelerate."""
