import type { Schemas } from "./api";

export type Role = Schemas["Session"]["role"];

/** From the least to the most. */
export const ROLES: readonly Role[] = ["viewer", "auditor", "operator", "data_scientist", "admin"];
