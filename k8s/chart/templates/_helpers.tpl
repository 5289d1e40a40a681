{{/* The name before -router and the like. */}}
{{- define "effuse.name" -}}
{{- $release := .Release.Name -}}
{{- $own := ternary $release (printf "%s-effuse" $release) (contains "effuse" $release) -}}
{{- .Values.fullnameOverride | default $own | trunc 48 | trimSuffix "-" -}}
{{- end }}

{{/* Refuses values of which one needs another one. */}}
{{- define "effuse.check" -}}
{{- $values := .Values -}}
{{- if not (regexMatch "^[a-z]" (include "effuse.name" .)) -}}
{{- fail "fullnameOverride: expected a name that begins with a letter, because Services have no other" -}}
{{- end -}}
{{- if and $values.model.create (not $values.model.claim) -}}
{{- fail "model.claim: expected a name for the claim, because model.create is set" -}}
{{- end -}}
{{- if ne (empty $values.model.claim) (empty $values.model.name) -}}
{{- fail "model.name: expected it together with model.claim" -}}
{{- end -}}
{{- if and $values.model.download.enabled (not $values.model.claim) -}}
{{- fail "model.claim: expected a name for the claim, because model.download.enabled is set" -}}
{{- end -}}
{{- range $role := prepend $values.roles "router" -}}
{{- $own := include "effuse.own" (dict "root" $ "role" $role) | fromYaml -}}
{{- include "effuse.checkRole" (dict "root" $ "role" $role "own" $own) -}}
{{- if gt (int $own.hosts) 1 -}}
{{- include "effuse.checkHosts" (dict "root" $ "role" $role "own" $own) -}}
{{- end -}}
{{- end -}}
{{- $taken := list 50051 50052 -}}
{{- if $values.tls.enabled -}}
{{- $taken = append $taken 50059 -}}
{{- end -}}
{{- if $values.router.http.enabled -}}
{{- $taken = append $taken 8000 -}}
{{- end -}}
{{- if and $values.metrics.enabled (has (int $values.metrics.port) $taken) -}}
{{- fail (printf "metrics.port: expected another port than %d, on which the pods listen for calls" (int $values.metrics.port)) -}}
{{- end -}}
{{- if and $values.tls.clientCertificates (not $values.tls.enabled) -}}
{{- fail "tls.clientCertificates: expected tls.enabled with it" -}}
{{- end -}}
{{- if and $values.networkPolicy.egressTo (not $values.networkPolicy.egress) -}}
{{- fail "networkPolicy.egress: expected it together with networkPolicy.egressTo" -}}
{{- end -}}
{{- $isClosed := and $values.networkPolicy.enabled $values.networkPolicy.egress (not $values.networkPolicy.egressTo) -}}
{{- if and $values.redis.url $isClosed -}}
{{- fail "networkPolicy.egressTo: expected a rule for redis.url, because networkPolicy.egress is set" -}}
{{- end -}}
{{- if and $values.redis.caSecret (not (hasPrefix "rediss" $values.redis.url)) -}}
{{- fail "redis.caSecret: expected a redis.url that begins with rediss" -}}
{{- end -}}
{{- if and $values.redis.sentinelSecret (not (contains "+sentinel://" $values.redis.url)) -}}
{{- fail "redis.sentinelSecret: expected a redis.url with +sentinel://" -}}
{{- end -}}
{{- end }}

{{/* Refuses the values of a role with which Kubernetes would start no pod, or nothing would scale it. */}}
{{- define "effuse.checkRole" -}}
{{- $role := .role -}}
{{- $own := .own -}}
{{- if and $own.autoscaling.enabled $own.autoscaling.scaler -}}
{{- if not .root.Values.metrics.enabled -}}
{{- fail (printf "metrics.enabled: expected it, because %s.autoscaling follows a metric" $role) -}}
{{- end -}}
{{- $least := int $own.autoscaling.minReplicas -}}
{{- $most := int $own.autoscaling.maxReplicas -}}
{{- if gt $least $most -}}
{{- fail (printf "%s.autoscaling.minReplicas: expected at most %d, which is its maxReplicas, got %d" $role $most $least) -}}
{{- end -}}
{{- end -}}
{{- if .root.Values.metrics.enabled -}}
{{- if has "--no-metrics" ($own.extraArgs | default list) -}}
{{- fail (printf "%s.extraArgs: expected no --no-metrics, because metrics.enabled is set" $role) -}}
{{- end -}}
{{- if regexMatch "(?m)^[ \\t]*metrics[ \\t]*=[ \\t]*false" ($own.config | default "") -}}
{{- fail (printf "%s.config: expected no metrics = false, because metrics.enabled is set" $role) -}}
{{- end -}}
{{- end -}}
{{- with $own.rollingUpdate -}}
{{- if and (hasKey . "maxUnavailable") (hasKey . "maxSurge") -}}
{{- if and (regexMatch "^0+%?$" (toString .maxUnavailable)) (regexMatch "^0+%?$" (toString .maxSurge)) -}}
{{- fail (printf "%s.rollingUpdate: expected maxUnavailable or maxSurge above 0, because no pod could be replaced" $role) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Refuses the values of a worker over several hosts that it cannot have, before its pods refuse the flags. */}}
{{- define "effuse.checkHosts" -}}
{{- $role := .role -}}
{{- $own := .own -}}
{{- $hosts := printf "%s.hosts is %d" $role (int $own.hosts) -}}
{{- if or (not $own.gpus) (mod (int $own.gpus) (int $own.hosts)) -}}
{{- fail (printf "%s.gpus: expected a multiple of the hosts, because %s, got %d" $role $hosts (int $own.gpus)) -}}
{{- end -}}
{{- if $own.autoscaling.enabled -}}
{{- fail (printf "%s.autoscaling.enabled: expected false, because %s" $role $hosts) -}}
{{- end -}}
{{- if not .root.Values.fleetSecret -}}
{{- fail (printf "fleetSecret: expected a name, because %s, and it encrypts commands between them" $hosts) -}}
{{- end -}}
{{- if gt (len (include "effuse.name" .root)) 40 -}}
{{- fail (printf "fullnameOverride: expected at most 40 characters, because %s, and labels of its pods hold the name" $hosts) -}}
{{- end -}}
{{- $refused := "kv-offloading-dir|kv-pool|batch-invariant" -}}
{{- range $own.extraArgs -}}
{{- if regexMatch (printf "^--(%s)(=|$)" $refused) . -}}
{{- fail (printf "%s.extraArgs: expected no %s, because %s" $role . $hosts) -}}
{{- end -}}
{{- end -}}
{{- with regexFind (printf "(?m)^[ \\t]*(%s)[ \\t]*=[ \\t]*[^f \\t].*$" $refused) ($own.config | default "") -}}
{{- fail (printf "%s.config: expected no %s, because %s" $role . $hosts) -}}
{{- end -}}
{{- end }}

{{- define "effuse.labels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: effuse
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{/* Labels of every pod of the release. */}}
{{- define "effuse.fleet" -}}
app.kubernetes.io/part-of: effuse
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{/* From here on the context is a dict of `root`, `role` and, for pods, `own`: the settings of the role. */}}
{{- define "effuse.selector" -}}
app.kubernetes.io/name: {{ .role }}
{{ include "effuse.fleet" .root }}
{{- end }}

{{/* Roles of the release, as a JSON list. */}}
{{- define "effuse.roles" -}}
{{- $fleet := prepend .Values.roles "router" -}}
{{- ternary $fleet (prepend $fleet "redis") (not (empty .Values.redis.url)) | toJson -}}
{{- end }}

{{/* Values of a role; those of a worker lie over those of `workers`. */}}
{{- define "effuse.own" -}}
{{- $own := index .root.Values .role -}}
{{- if has .role (list "prefill" "decode" "worker") -}}
{{- $own = mergeOverwrite (deepCopy .root.Values.workers) (deepCopy $own) -}}
{{- end -}}
{{- toYaml $own -}}
{{- end }}

{{- define "effuse.redisUrl" -}}
{{- .Values.redis.url | default (printf "redis://%s-redis:6379/0" (include "effuse.name" .)) -}}
{{- end }}

{{- define "effuse.serviceAccount" -}}
{{- $made := ternary (include "effuse.name" .) "" .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default $made -}}
{{- end }}

{{/* Everything that a pod mounts: volumes with the path of each. */}}
{{- define "effuse.mounts" -}}
{{- $values := .root.Values -}}
{{- $secrets := dict -}}
{{- if and (eq .role "redis") $values.redis.credentialsSecret -}}
{{- $_ := set $secrets "redis-users" (list $values.redis.credentialsSecret "users.acl") -}}
{{- else if ne .role "redis" -}}
{{- $_ := set $secrets "redis-credentials" (list $values.redis.credentialsSecret "credentials") -}}
{{- $_ := set $secrets "sentinel-credentials" (list $values.redis.sentinelSecret "credentials") -}}
{{- $_ := set $secrets "redis-ca" (list $values.redis.caSecret "ca.crt") -}}
{{- $_ := set $secrets "fleet-secret" (list $values.fleetSecret "secret") -}}
{{- if eq .role "router" -}}
{{- $_ := set $secrets "keys" (list $values.router.keysSecret "keys") -}}
{{- end -}}
{{- if $values.tls.enabled -}}
{{- $_ := set $secrets "fleet-tls" (list $values.tls.fleetSecret) -}}
{{- if eq .role "router" -}}
{{- $_ := set $secrets "router-tls" (list $values.tls.routerSecret) -}}
{{- end -}}
{{- end -}}
{{- end -}}
- name: tmp
  mountPath: /tmp
  volume:
    emptyDir:
      sizeLimit: {{ get (dict "redis" "64Mi" "router" "256Mi") .role | default "1Gi" }}
{{- if .own.shmSize }}
- name: shm
  mountPath: /dev/shm
  volume:
    emptyDir:
      medium: Memory
      sizeLimit: {{ .own.shmSize }}
{{- end }}
{{- range $name, $secret := $secrets }}
{{- if first $secret }}
- name: {{ $name }}
  mountPath: /{{ $name }}
  readOnly: true
  volume:
    secret:
      secretName: {{ first $secret | quote }}
      defaultMode: 0440
      {{- with rest $secret }}
      items:
        - key: {{ first . }}
          path: {{ first . }}
      {{- end }}
{{- end }}
{{- end }}
{{- if and (ne .role "redis") $values.model.claim }}
- name: models
  mountPath: /models
  readOnly: true
  volume:
    persistentVolumeClaim:
      claimName: {{ $values.model.claim | quote }}
      readOnly: true
{{- end }}
{{- if .own.config }}
- name: config
  mountPath: /config
  readOnly: true
  volume:
    configMap:
      name: {{ include "effuse.name" .root }}-flags
{{- end }}
{{- end }}

{{/* File of the role's flags: workers share one unless the role has flags of its own. */}}
{{- define "effuse.flagsFile" -}}
{{- $own := index .root.Values .role -}}
{{- ternary .role "workers" (or (eq .role "router") (not (empty $own.config))) -}}.toml
{{- end }}

{{/* Requirements of the "restricted" pod-security level, of a pod and of a container. */}}
{{- define "effuse.restrictedPod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "effuse.restrictedContainer" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}

{{- define "effuse.image" -}}
{{- printf "%s-%s:%s" .root.Values.image.repository .name (.root.Values.image.tag | default .root.Chart.AppVersion) | quote -}}
{{- end }}

{{/* A policy of a `type` for the pods of some `roles`, up to its rules. */}}
{{- define "effuse.policy" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "effuse.name" .root }}-{{ .name }}
  labels:
    {{- include "effuse.labels" .root | nindent 4 }}
spec:
  policyTypes: [{{ .type | default "Ingress" }}]
  podSelector:
    matchLabels:
      {{- include "effuse.fleet" .root | nindent 6 }}
    matchExpressions:
      - key: app.kubernetes.io/name
        operator: {{ ternary "NotIn" "In" (hasKey . "others") }}
        values: {{ .others | default .roles | toJson }}
  {{ lower (.type | default "Ingress") }}:
{{- end }}
