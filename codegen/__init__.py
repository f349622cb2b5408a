"""From plans to kernels: schedules and text."""
