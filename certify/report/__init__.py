"""Reports for people: a table for the terminal, and a page for the browser."""
