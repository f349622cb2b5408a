"""One .rec file per published recurrence."""
