import type { Schemas } from "./api";
import { whole } from "./format";

export type Cost = "bytes" | "latency_us";

/** Accuracy and cost of a version at one of its stages. */
export interface Measurement {
  readonly version: string;
  readonly number: number;
  readonly stage: string;
  readonly accuracy: number;
  readonly bytes: number | null;
  readonly latency_us: number | null;
}

/** What was measured of versions, stage by stage; stages without an accuracy are left out. */
export function measurements(versions: readonly Schemas["Version"][]): Measurement[] {
  return versions.flatMap((version) =>
    Object.entries(version.metrics as Record<string, Record<string, number>>).flatMap(([stage, figures]) => {
      const accuracy = figures["test_accuracy"] ?? figures["accuracy"];
      // The figures of the source belong to the version that this one was made from.
      if (accuracy === undefined || stage === "source") return [];
      const size = figures["bytes"] ?? (isWhole(stage) ? modelBytes(version) : null);
      return [{ version: version.version, number: version.number, stage, accuracy, bytes: size, latency_us: figures["latency_us"] ?? null }];
    }),
  );
}

/** Size of what a device would hold: the converted model if there is one, else the params. */
function modelBytes(version: Schemas["Version"]): number | null {
  const size = (pattern: RegExp): number => version.files.filter((file) => pattern.test(file.path)).reduce((sum, file) => sum + file.size_bytes, 0);
  return size(/\.tflite$/) || size(/\.(safetensors|onnx)$/) || null;
}

/** Whether the stage's figures are those of the version's own files, not of a step on the way. */
function isWhole(stage: string): boolean {
  return stage === "run" || stage === "pretrain" || stage === "final" || stage === "release" || stage === "import";
}

/** Those with this cost, by cost: the order of a drawing's axis. */
export function along(found: readonly Measurement[], cost: Cost): Measurement[] {
  return found.filter((each) => each[cost] !== null).sort((one, other) => (one[cost] ?? 0) - (other[cost] ?? 0));
}

/** What versions are made of, for `differences`: everything but their numbers and times. */
export function described(version: Schemas["Version"]): object {
  return {
    stage: version.stage,
    kind: version.kind,
    ...version.about,
    ...version.metrics,
    files: Object.fromEntries(version.files.map((file) => [file.path, `${file.sha256.slice(0, 12)}, ${whole(file.size_bytes)} B`])),
  };
}
