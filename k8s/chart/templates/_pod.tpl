{{/* A pod of a role. The context is a dict of `root`, `role`, `own` and `joins`: whether pod 0 of its group speaks for it. */}}
{{- define "effuse.pod" -}}
{{- $root := .root }}
{{- $role := .role }}
{{- $own := .own }}
{{- $isWorker := has $role (list "prefill" "decode" "worker") }}
{{- $mounts := list }}
{{- $volumes := list }}
{{- range include "effuse.mounts" . | fromYamlArray }}
{{- $mounts = append $mounts (omit . "volume") }}
{{- $volumes = append $volumes (merge (dict "name" .name) .volume) }}
{{- end -}}
metadata:
  labels:
    {{- with $own.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- include "effuse.selector" $ | nindent 4 }}
  {{- $annotations := dict }}
  {{- if $own.config }}
  {{- $_ := set $annotations "checksum/config" (sha256sum $own.config) }}
  {{- end }}
  {{- if and $root.Values.metrics.enabled (not .joins) (ne $role "redis") }}
  {{- $_ := set $annotations "prometheus.io/scrape" "true" }}
  {{- $_ := set $annotations "prometheus.io/port" (toString $root.Values.metrics.port) }}
  {{- end }}
  {{- with merge (deepCopy ($own.podAnnotations | default dict)) $annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  # Longer than draining takes, with preStop before it.
  terminationGracePeriodSeconds: {{ get (dict "redis" 10 "router" (add (int $own.drainS) 45)) $role | default (add (int $own.drainS) 100) }}
  {{- include "effuse.restrictedPod" $root | nindent 2 }}
  {{- with include "effuse.serviceAccount" $root }}
  serviceAccountName: {{ . | quote }}
  {{- end }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . | quote }}
    {{- end }}
  {{- end }}
  {{- range $field := list "nodeSelector" "affinity" "priorityClassName" "runtimeClassName" }}
  {{- with get $own $field }}
  {{ $field }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- $ownTaint := dict "key" "nvidia.com/gpu" "operator" "Exists" "effect" "NoSchedule" }}
  {{- with concat (ternary (list $ownTaint) list (gt (int $own.gpus) 0)) ($own.tolerations | default list) }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- $spread := list }}
  {{- range $own.topologySpreadConstraints }}
  {{- $pods := dict "labelSelector" (dict "matchLabels" (include "effuse.selector" $ | fromYaml)) }}
  {{- $spread = append $spread (ternary . (merge $pods .) (hasKey . "labelSelector")) }}
  {{- end }}
  topologySpreadConstraints:
    {{- with $spread }}
    {{- toYaml . | nindent 4 }}
    {{- else }}
    {{- range $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
    - maxSkew: 1
      topologyKey: {{ $key }}
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "effuse.fleet" $root | nindent 10 }}
      matchLabelKeys: [app.kubernetes.io/name, pod-template-hash]
    {{- end }}
    {{- end }}
  containers:
    - name: {{ $role }}
      image: {{ include "effuse.image" (dict "root" $root "name" (ternary "worker" $role $isWorker)) }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      {{- include (ternary "effuse.worker" (printf "effuse.%s" $role) $isWorker) . | nindent 6 }}
      resources:
        {{- $resources := deepCopy ($own.resources | default dict) }}
        {{- if $own.gpus }}
        {{- $gpus := dict "limits" (dict $own.gpuResource (div (int $own.gpus) (int $own.hosts))) }}
        {{- $resources = mergeOverwrite $resources $gpus }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
      {{- include "effuse.restrictedContainer" $root | nindent 6 }}
      volumeMounts:
        {{- toYaml (concat $mounts ($own.volumeMounts | default list)) | nindent 8 }}
  volumes:
    {{- toYaml (concat $volumes ($own.volumes | default list)) | nindent 4 }}
{{- end }}
