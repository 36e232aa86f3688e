{{- define "penstock.image" -}}
{{ if .Values.kustomize }}penstock{{ else }}{{ .Values.image.repository }}:{{ .Values.image.tag }}{{ end }}
{{- end }}

{{- define "penstock.labels" -}}
{app.kubernetes.io/name: {{ .name }}, app.kubernetes.io/part-of: {{ .root.Release.Name }}}
{{- end }}

{{- /* A pod's metadata: a changed setting replaces the pods, as kustomize does by the ConfigMap's name. */ -}}
{{- define "penstock.podMetadata" -}}
metadata:
  labels: {{ include "penstock.labels" . }}
  {{- if not .root.Values.kustomize }}
  annotations: {checksum/settings: {{ .root.Values.settings | toJson | sha256sum }}}
  {{- end }}
{{- end }}

{{- define "penstock.podSecurity" -}}
securityContext: {runAsNonRoot: true, runAsUser: 65532, {{ if .fsGroup }}fsGroup: 65532, {{ end }}seccompProfile: {type: RuntimeDefault}}
automountServiceAccountToken: false
{{- end }}

{{- /* A container's fields without its probes: image, settings, rights, resources. */ -}}
{{- define "penstock.container" -}}
name: {{ .name }}
image: {{ include "penstock.image" .root }}
{{- if not .root.Values.kustomize }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{- end }}
args: {{ toJson .args }}
envFrom: [{configMapRef: {name: {{ .root.Release.Name }}}}, {secretRef: {name: {{ .root.Values.secret }}}}]
securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
resources: {{ toJson (default .root.Values.resources .resources) }}
{{- end }}

{{- define "penstock.probes" -}}
ports: [{name: metrics, containerPort: 9310}]
startupProbe: {httpGet: {path: /livez, port: metrics}, failureThreshold: 30, periodSeconds: 2}
livenessProbe: {httpGet: {path: /livez, port: metrics}, periodSeconds: 10, timeoutSeconds: 5}
readinessProbe: {httpGet: {path: /readyz, port: metrics}, periodSeconds: 5, timeoutSeconds: 5}
{{- end }}

{{- /* A Deployment of a command that runs until it is stopped, and its budget of disruptions. */ -}}
{{- define "penstock.service" -}}
apiVersion: apps/v1
kind: Deployment
metadata: {name: {{ .name }}, labels: {app.kubernetes.io/name: {{ .name }}}}
spec:
  {{- if or .root.Values.kustomize (not .scaling) }}
  replicas: {{ .replicas }}
  {{- end }}
  selector: {matchLabels: {app.kubernetes.io/name: {{ .name }}}}
  template:
    {{- include "penstock.podMetadata" . | nindent 4 }}
    spec:
      {{- include "penstock.podSecurity" . | nindent 6 }}
      topologySpreadConstraints:
        - maxSkew: 1
          topologyKey: kubernetes.io/hostname
          whenUnsatisfiable: ScheduleAnyway
          labelSelector: {matchLabels: {app.kubernetes.io/name: {{ .name }}}}
      terminationGracePeriodSeconds: {{ .grace }}
      containers:
        - {{- include "penstock.container" . | nindent 10 | trimPrefix "\n         " }}
          {{- include "penstock.probes" . | nindent 10 }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: {{ .name }}}
spec:
  maxUnavailable: 1
  selector: {matchLabels: {app.kubernetes.io/name: {{ .name }}}}
{{- end }}

{{- /* A pod that ends. */ -}}
{{- define "penstock.job" -}}
backoffLimit: {{ .retries }}
template:
  metadata: {labels: {{ include "penstock.labels" . }}}
  spec:
    restartPolicy: {{ .restart }}
    {{- include "penstock.podSecurity" . | nindent 4 }}
    containers:
      - {{- include "penstock.container" . | nindent 8 | trimPrefix "\n       " }}
{{- end }}
