"""Rules of context extension, as hooks: other frequencies, planes held, windows, shared positions; one table of all."""
