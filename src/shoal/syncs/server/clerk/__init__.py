"""The clerk of a run with servers: who leases work and orders that steps are applied."""
