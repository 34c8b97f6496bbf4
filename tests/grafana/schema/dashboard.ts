// What a dashboard's JSON may hold, by Grafana's own types. `Json` is the type of a value once it is written as JSON: an
// enum is its text. An annotation's query is Prometheus's, which the general type leaves to the datasource.
import type { AnnotationQuery, Dashboard, DataQuery } from "@grafana/schema";

type Json<T> = T extends string
  ? `${T}`
  : T extends number | boolean
    ? T
    : T extends (infer Item)[]
      ? Json<Item>[]
      : T extends object
        ? { [Key in keyof T]: Json<T[Key]> }
        : T;
type Annotation = Omit<AnnotationQuery, "target"> & { target: DataQuery & { expr: string } };

export type DashboardJson = Json<Omit<Dashboard, "annotations"> & { annotations: { list: Annotation[] } }>;
