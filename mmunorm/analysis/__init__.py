"""Reading, measuring and drawing what training runs leave behind."""
