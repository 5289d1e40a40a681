{{/* What differs between the roles' containers. The context is a dict of `root`, `role` and `own`. */}}

{{- define "effuse.redis" -}}
args:
  - --maxmemory
  - {{ .own.maxMemory | quote }}
  - --maxmemory-policy
  - noeviction
  {{- if .own.credentialsSecret }}
  - --aclfile
  - /redis-users/users.acl
  {{- end }}
ports:
  - name: redis
    containerPort: 6379
startupProbe:
  tcpSocket:
    port: redis
  periodSeconds: 1
  failureThreshold: 30
readinessProbe:
  tcpSocket:
    port: redis
  periodSeconds: 5
livenessProbe:
  tcpSocket:
    port: redis
  periodSeconds: 10
  failureThreshold: 6
{{- end }}

{{/* Flags of every process of the fleet. */}}
{{- define "effuse.flags" -}}
{{- $values := .root.Values -}}
- --host=0.0.0.0
- --allow-plaintext={{ ternary "pages" "all" $values.tls.enabled }}
- --redis-url={{ include "effuse.redisUrl" .root }}
- --fleet={{ $values.fleet | default (include "effuse.name" .root) }}
{{- if $values.redis.credentialsSecret }}
- --redis-credentials=/redis-credentials/credentials
{{- end }}
{{- if $values.redis.sentinelSecret }}
- --sentinel-credentials=/sentinel-credentials/credentials
{{- end }}
{{- if $values.redis.caSecret }}
- --redis-ca=/redis-ca/ca.crt
{{- end }}
{{- if $values.fleetSecret }}
- --fleet-secret=/fleet-secret/secret
{{- end }}
{{- if $values.tls.enabled }}
- --fleet-cert=/fleet-tls/tls.crt
- --fleet-key=/fleet-tls/tls.key
- --fleet-ca=/fleet-tls/ca.crt
- --health-port=50059
{{- end }}
{{- if $values.metrics.enabled }}
- --metrics-host=0.0.0.0
- --metrics-port={{ $values.metrics.port }}
{{- end }}
{{- if $values.model.claim }}
- --model=/models/{{ $values.model.name }}
{{- end }}
- --drain-s={{ .own.drainS }}
{{- if .own.config }}
- --config=/config/{{ include "effuse.flagsFile" . }}
{{- end }}
{{- end }}

{{/* The process answers for itself only. It has hung if it does not answer, and then it does not drain either. */}}
{{- define "effuse.livenessProbe" -}}
livenessProbe:
  grpc:
    port: {{ .port }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
  terminationGracePeriodSeconds: 10
{{- end }}

{{- define "effuse.router" -}}
{{- $values := .root.Values -}}
{{- $port := ternary 50059 50051 $values.tls.enabled -}}
args:
  {{- include "effuse.flags" . | nindent 2 }}
  - --port=50051
  {{- if .own.http.enabled }}
  - --http-port=8000
  {{- end }}
  {{- if $values.tls.enabled }}
  - --tls-cert=/router-tls/tls.crt
  - --tls-key=/router-tls/tls.key
  {{- if $values.tls.clientCertificates }}
  - --tls-client-ca=/router-tls/ca.crt
  {{- end }}
  {{- end }}
  {{- if .own.keysSecret }}
  - --keys=/keys/keys
  {{- end }}
  {{- with .own.extraArgs }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .own.env }}
env:
  {{- toYaml . | nindent 2 }}
{{- end }}
ports:
  - name: grpc
    containerPort: 50051
  {{- if .own.http.enabled }}
  - name: http
    containerPort: 8000
  {{- end }}
  {{- if $values.metrics.enabled }}
  - name: metrics
    containerPort: {{ $values.metrics.port }}
  {{- end }}
startupProbe:
  grpc:
    port: {{ $port }}
  periodSeconds: 2
  failureThreshold: 60
# Ready means that a decode worker can answer. Without one, requests wait in the router for --recovery-s (60 s), and
# it stays Ready for as long.
readinessProbe:
  grpc:
    port: {{ $port }}
    service: effuse.v1.GenerationService
  periodSeconds: 5
  failureThreshold: 12
{{ include "effuse.livenessProbe" (dict "port" $port) }}
# Endpoints need a moment to forget a pod that goes.
lifecycle:
  preStop:
    sleep:
      seconds: 5
{{- end }}

{{- define "effuse.worker" -}}
{{- $values := .root.Values -}}
{{- $port := ternary 50059 50052 $values.tls.enabled -}}
{{- $service := printf "effuse.v1.%sService" (title .role) -}}
{{- if ne .role "worker" }}
command: [effuse-{{ .role }}]
{{- end }}
args:
  {{- include "effuse.flags" . | nindent 2 }}
  - --port=50052
  - --advertise-host=$(POD_IP)
  - --worker-id=$(POD_NAME)
  - --connector={{ $values.connector }}
  {{- with $values.model.name }}
  - {{ printf "--served-model-name=%s" . | quote }}
  {{- end }}
  {{- if .own.gpus }}
  - --device=cuda
  {{- if gt (int .own.gpus) 1 }}
  - --{{ .own.parallel | default "tensor" }}-parallel-size={{ .own.gpus }}
  {{- end }}
  {{- end }}
  {{- if gt (int .own.hosts) 1 }}
  # The controller sets the variables: the number of each pod, and the address of pod 0 of the group.
  - --nnodes={{ .own.hosts }}
  - --node-rank=$(LWS_WORKER_INDEX)
  - --master-addr=$(LWS_LEADER_ADDRESS)
  {{- end }}
  - --startup-timeout-s={{ .own.startupTimeoutS }}
  {{- with .own.extraArgs }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
env:
  - name: POD_IP
    valueFrom:
      fieldRef:
        fieldPath: status.podIP
  - name: POD_NAME
    valueFrom:
      fieldRef:
        fieldPath: metadata.name
  - name: UCX_TLS
    value: {{ .own.ucxTls | quote }}
  {{- with .own.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  - name: grpc
    containerPort: 50052
  {{- if and $values.metrics.enabled (not .joins) }}
  - name: metrics
    containerPort: {{ $values.metrics.port }}
  {{- end }}
# Longer than the worker gives itself to load.
startupProbe:
  grpc:
    port: {{ $port }}
    service: {{ $service }}
  periodSeconds: 2
  failureThreshold: {{ max 300 (add (div (int .own.startupTimeoutS) 2) 60) }}
readinessProbe:
  grpc:
    port: {{ $port }}
    service: {{ $service }}
  periodSeconds: 5
{{ include "effuse.livenessProbe" (dict "port" $port) }}
{{- end }}
