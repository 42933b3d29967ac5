"""Commands of ``slipstream`` that neither train nor simulate: plan, audit, convert and doctor."""
