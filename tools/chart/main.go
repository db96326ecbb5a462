// Command chart checks and renders a Helm chart with Helm's own packages, as helm lint and helm template do, and
// helm install with -kubeconfig. The test of make e2e-kube gives the output to an API server.
package main

import (
	"flag"
	"fmt"
	"log"
	"maps"
	"os"
	"path"
	"slices"
	"strings"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/chart/v2/lint"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("chart: ")
	release := common.ReleaseOptions{IsInstall: true, Revision: 1}
	flag.StringVar(&release.Name, "name", "dlrover-master", "name of the release")
	flag.StringVar(&release.Namespace, "namespace", "default", "namespace of the release")
	file := flag.String("values", "", "file with values that replace those of the chart")
	cluster := flag.String("kubeconfig", "", "cluster in which templates look objects up; without it they find none")
	flag.Parse()
	if flag.NArg() != 1 {
		log.Fatal("need one argument, the chart's directory")
	}
	text, err := render(flag.Arg(0), *file, *cluster, release)
	if err != nil {
		log.Fatal(err)
	}
	os.Stdout.WriteString(text)
}

func render(dir, file, cluster string, release common.ReleaseOptions) (string, error) {
	values := map[string]any{}
	if file != "" {
		read, err := common.ReadValuesFile(file)
		if err != nil {
			return "", err
		}
		values = read
	}
	if err := check(dir, release.Namespace, values); err != nil {
		return "", err
	}
	chart, err := loader.LoadDir(dir)
	if err != nil {
		return "", err
	}
	all, err := util.ToRenderValues(chart, values, release, common.DefaultCapabilities)
	if err != nil {
		return "", err
	}
	var api *rest.Config
	if cluster != "" {
		if api, err = clientcmd.BuildConfigFromFlags("", cluster); err != nil {
			return "", err
		}
	}
	e := engine.Engine{Strict: true}
	if api != nil {
		e = engine.New(api)
		e.Strict = true
	}
	files, err := e.Render(chart, all)
	if err != nil {
		return "", err
	}
	var docs []string
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if path.Ext(name) == ".yaml" && strings.TrimSpace(files[name]) != "" {
			docs = append(docs, strings.TrimSpace(files[name])+"\n")
		}
	}
	return strings.Join(docs, "---\n"), nil
}

// check is helm lint --strict.
func check(dir, namespace string, values map[string]any) error {
	for _, m := range lint.RunAll(dir, values, namespace).Messages {
		if m.Severity > 1 { // more than information
			return fmt.Errorf("%s: %w", m.Path, m.Err)
		}
	}
	return nil
}
