import type { Schemas } from "./api";

export type Role = Schemas["Session"]["role"];

/** From the least to the most. */
export const ROLES: readonly Role[] = ["viewer", "auditor", "operator", "data_scientist", "admin"];

/** Of a member of a project; the others are of the whole coordinator. */
export const MEMBER_ROLES: readonly Schemas["Member"]["role"][] = ["viewer", "operator", "data_scientist"];
