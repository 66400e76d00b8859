"""How any operation reaches the GPU: eligibility, launch plans, configurations, torch operators."""
