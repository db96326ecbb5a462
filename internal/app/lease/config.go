package lease

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"dlrover-run/internal/app/kube"
	"dlrover-run/rendezvous/lead"
)

// Config names the Lease, and how its API server is reached.
type Config struct {
	Name         string // of the Lease
	Namespace    string
	Pod          string // that gets the label; "": none
	PodNamespace string // "": that of the Lease
	API          *rest.Config
	Log          *slog.Logger
}

// Locate returns the configuration of a process in a pod, or outside of one that which KUBECONFIG names. An empty
// namespace is the pod's own, or the present one of the file.
func Locate(name, namespace string, log *slog.Logger) (Config, error) {
	cfg := Config{Name: name, Namespace: namespace, Pod: os.Getenv("POD_NAME"), Log: log}
	in, err := kube.InCluster()
	switch {
	case err == nil:
		host, _ := os.Hostname()
		cfg.Pod, cfg.PodNamespace = cmp.Or(cfg.Pod, host), in.Namespace
		cfg.Namespace = cmp.Or(namespace, in.Namespace)
		cfg.API = &rest.Config{
			Host: in.Server, BearerTokenFile: in.TokenFile, TLSClientConfig: rest.TLSClientConfig{CAFile: in.CAFile},
		}
	case !errors.Is(err, kube.ErrNotInCluster):
		return cfg, err
	case os.Getenv(clientcmd.RecommendedConfigPathEnvVar) == "":
		return cfg, fmt.Errorf("%w; elsewhere KUBECONFIG has to name a file", err)
	default:
		file := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(clientcmd.NewDefaultClientConfigLoadingRules(), nil)
		if cfg.API, err = file.ClientConfig(); err != nil {
			return cfg, fmt.Errorf("KUBECONFIG: %w", err)
		}
		if cfg.Namespace == "" {
			cfg.Namespace, _, err = file.Namespace()
		}
	}
	if err == nil && cfg.Namespace == "" {
		err = errors.New("the pod's namespace is not known: name one with --lease-namespace")
	}
	return cfg, err
}

// Open sends nothing.
func Open(cfg Config) (*Store, error) {
	api := rest.CopyConfig(cfg.API)
	api.UserAgent = "dlrover-master"
	api.QPS = -1                           // renewals wait for nothing
	api.WarningHandler = rest.NoWarnings{} // they would be printed
	api.NextProtos = []string{"http/1.1"}  // a request that is given up gives up its connection, which may be dead
	if api.Proxy == nil {
		api.Proxy = func(*http.Request) (*url.URL, error) { return nil, nil } // one of the environment would get the token
	}
	client, err := rest.HTTPClientFor(api)
	if err != nil {
		return nil, fmt.Errorf("Kubernetes: %w", err)
	}
	d, err := dynamic.NewForConfigAndClient(api, client)
	if err != nil {
		return nil, fmt.Errorf("Kubernetes: %w", err)
	}
	of := func(group, plural, namespace string, patience time.Duration) resource {
		r := schema.GroupVersionResource{Group: group, Version: "v1", Resource: plural}
		return resource{d.Resource(r).Namespace(namespace), patience}
	}
	s := &Store{
		name: cfg.Name, pod: cfg.Pod, http: client, log: cfg.Log, mine: map[lead.Leader]bool{},
		leases: of("coordination.k8s.io", "leases", cfg.Namespace, patience),
		maps:   of("", "configmaps", cfg.Namespace, bulk),
		pods:   of("", "pods", cmp.Or(cfg.PodNamespace, cfg.Namespace), patience),
	}
	s.ctx, s.stop = context.WithCancel(context.Background())
	return s, nil
}
