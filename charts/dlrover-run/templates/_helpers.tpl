{{- define "dlrover.selector" -}}
app.kubernetes.io/name: dlrover-master
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "dlrover.labels" -}}
{{ include "dlrover.selector" . }}
app.kubernetes.io/part-of: dlrover-run
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "dlrover.metadata" -}}
name: {{ .Release.Name }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "dlrover.labels" . | nindent 2 }}
{{- end }}

{{- /* Of objects outside of the release's namespace. */}}
{{- define "dlrover.outside" -}}
{{ .Release.Namespace }}-{{ .Release.Name }}
{{- end }}
