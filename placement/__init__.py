"""Who is alive and what lives where; the only folder that speaks Redis."""
